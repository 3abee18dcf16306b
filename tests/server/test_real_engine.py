"""`octavo serve` as users run it, over a tiny random model in float32: text, limits, faults, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import tiny
from tests.server.running import running
from tests.server.test_metrics import CORE_GAUGES, samples

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
LIMIT = tiny.CONTEXT
MESSAGES = [{"role": "user", "content": "The quick brown fox"}]


@dataclass
class Octavo:
    """A server process and a client of it."""

    child: subprocess.Popen[str]
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def text(self, **body: Any) -> dict[str, Any]:
        """The first choice of a greedy completion."""
        response = self.post(
            TEXTS, **({"temperature": 0, "prompt": tiny.PROMPTS[0], "max_tokens": 48} | body)
        )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer["choices"][0] | {"usage": answer["usage"]}

    def stream(self, path: str = TEXTS, **body: Any) -> list[dict[str, Any]]:
        body = {"temperature": 0, "max_tokens": 48, "stream": True} | body
        if path == TEXTS:
            body.setdefault("prompt", tiny.PROMPTS[0])
        with self.client.stream("POST", path, json=body) as response:
            data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert data[-1] == "[DONE]", data
        return [json.loads(item) for item in data[:-1]]

    def metrics(self) -> dict[str, float]:
        return samples(self.client.get("/metrics").text)


@contextlib.contextmanager
def octavo(*args: str, model: str | None = None) -> Iterator[Octavo]:
    model = model or str(tiny.checkpoint("llama"))
    with running(model, "--served-model-name", "tiny", "--dtype", "float32", *args) as (child, _, client):
        yield Octavo(child, client)


@pytest.fixture(scope="module")
def server() -> Iterator[Octavo]:
    with octavo("--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "32") as server:
        yield server


def settled(server: Octavo, seconds: float = 5.0) -> dict[str, float]:
    """The metrics once nothing runs; fails after `seconds`, of which a machine that is busy with others
    takes none: the server's processes must have computed for as long, or have been idle a minute."""
    begun, used = time.monotonic(), cpu_seconds(server)
    while True:
        found = server.metrics()
        over = time.monotonic() - begun > seconds and (
            cpu_seconds(server) - used > seconds or time.monotonic() - begun > 60
        )
        if over or all(found[name] == 0 for name in CORE_GAUGES):
            assert {name: found[name] for name in CORE_GAUGES} == dict.fromkeys(CORE_GAUGES, 0)
            return found
        time.sleep(0.02)


def cpu_seconds(server: Octavo) -> float:
    """Seconds that the server's process and its children have computed."""
    import psutil

    process = psutil.Process(server.child.pid)
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def test_cached_tokens_when_the_second_choice_is_ready_first(server: Octavo) -> None:
    """It finds one block more than the first choice, which fills that block in the same step."""
    prompt = [17] * 16 + list(range(30, 47))
    server.text(prompt=prompt[:17], max_tokens=1)
    options = {"n": 2, "stream_options": {"include_usage": True}}
    usage = server.stream(prompt=prompt, max_tokens=2, **options)[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16


def test_tokens_are_those_of_transformers(server: Octavo) -> None:
    choice = server.text(return_token_ids=True, ignore_eos=True)
    assert choice["token_ids"] == tiny.greedy("llama", 0)[:48]


def test_official_client_streams_what_it_answers(server: Octavo) -> None:
    client = openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    parts = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 5


@pytest.mark.parametrize("max_tokens", range(1, 30, 4))
def test_half_characters(server: Octavo, max_tokens: int) -> None:
    # Any byte but no special token, so that most characters are cut and many never come whole.
    ask = {"allowed_token_ids": list(range(5, 261)), "temperature": 1.0, "seed": 5, "max_tokens": max_tokens}
    whole = server.text(**ask)["text"]
    chunks = [chunk["choices"][0]["text"] for chunk in server.stream(**ask)]
    assert "".join(chunks) == whole


def test_logprob_bytes_are_the_text(server: Octavo) -> None:
    ask = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "max_tokens": 40, "temperature": 0}
    choice = server.post(CHAT, **ask).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    data = bytes(b for entry in entries for b in entry["bytes"])
    assert data.decode("utf-8", "replace") == choice["message"]["content"]
    streamed = [
        entry
        for chunk in server.stream(CHAT, **ask)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [e["token"] for e in streamed] == [e["token"] for e in entries]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start", [3, 10, 21])
def test_stop_strings(server: Octavo, start: int, include: bool) -> None:
    text = server.text()["text"]
    stop = text[start : start + 4]
    ask = {"stop": ["never in it", stop, text[start + 5 : start + 9]], "include_stop_str_in_output": include}
    want = text[: text.index(stop) + (len(stop) if include else 0)]
    choice = server.text(**ask)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want, "stop", stop)
    chunks = server.stream(**ask)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_false_start_of_a_stop_is_released(server: Octavo) -> None:
    text = server.text()["text"]
    for start in (2, 9, 20):
        ask = {"stop": [text[start : start + 3] + "\x07never"]}
        assert "".join(chunk["choices"][0]["text"] for chunk in server.stream(**ask)) == text
        assert server.text(**ask)["text"] == text


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_max_tokens_beyond_the_context_is_clamped(server: Octavo, extra: int) -> None:
    prompt = [7] * 240
    for asked in (LIMIT - 240 + extra, LIMIT + extra):
        choice = server.text(prompt=prompt, max_tokens=asked, ignore_eos=True)
        assert choice["usage"]["completion_tokens"] == min(asked, LIMIT - 240)
        assert choice["finish_reason"] == "length"


def test_prompt_that_fills_the_context_is_refused(server: Octavo) -> None:
    for length in (LIMIT, LIMIT + 1, 5000):
        error = server.post(TEXTS, prompt=[7] * length).json()["error"]
        assert str(length) in error["message"] and str(LIMIT) in error["message"]
        assert error["param"] == "prompt"


def test_cached_tokens_and_their_metric(server: Octavo) -> None:
    def cached(prompt: list[int], **more: Any) -> int:
        usage = server.text(prompt=prompt, max_tokens=1, **more)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    before = server.metrics()["octavo:prefix_cache_hits_total"]
    base = [11] * 3 + list(range(20, 82))
    assert [cached(base[:64]), cached(base[:64]), cached(base[:65]), cached(base[:15])] == [0, 48, 64, 0]
    assert [cached(base, cache_salt=salt) for salt in ("A", "A", "B")] == [0, 64, 0]
    assert server.metrics()["octavo:prefix_cache_hits_total"] - before == 48 + 64 + 64


def test_seeds(server: Octavo) -> None:
    ask = {"temperature": 0.8, "max_tokens": 24, "return_token_ids": True, "n": 3, "prompt": tiny.PROMPTS[1]}

    def draw(**more: Any) -> list[list[int]]:
        return [c["token_ids"] for c in server.post(TEXTS, **ask, **more).json()["choices"]]

    alone = draw(seed=3)
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda i: draw(seed=3) if i % 2 else draw(), range(8)))
    assert all(crowd[i] == alone for i in (1, 3, 5, 7))
    assert len({tuple(choice) for choice in alone}) == 3
    assert crowd[0] != crowd[2]


BAD: list[dict[str, Any]] = [
    {"prompt": [-1]}, {"prompt": [tiny.VOCAB_SIZE]}, {"prompt": [2**40]}, {"prompt": ""}, {"prompt": []},
    {"prompt": "a", "logit_bias": {"x": 1}}, {"prompt": "a", "logit_bias": {str(tiny.VOCAB_SIZE): 1}},
    {"prompt": "a", "n": 0}, {"prompt": "a", "n": 10**6}, {"prompt": "a", "stop": "x" * 2**20},
    {"prompt": "a", "stop_token_ids": [tiny.VOCAB_SIZE], "min_tokens": 5},
    {"prompt": "a", "allowed_token_ids": [2**30]}, {"prompt": "a", "logprobs": 21},
    {"prompt": "a", "logprobs": -5}, {"prompt": "a", "prompt_logprobs": 10**6},
    *({"prompt": "a", "cache_salt": salt} for salt in ("", "x" * 129, "a/b", "a@b", "a\\b", "a\0b")),
    {"prompt": "a", "priority": 2**40}, {"prompt": "a", "min_tokens": 5000, "max_tokens": 6000},
    {"prompt": "a", "temperature": 1e300, "top_p": 2},
    {"prompt": ["a", "b", ""]}, {"prompt": "a", "bad_words": [""]},
]  # fmt: skip


def test_bad_input_leaves_the_victim_unchanged(server: Octavo) -> None:
    ask = {"max_tokens": 200, "prompt": tiny.PROMPTS[1], "ignore_eos": True}
    want = server.text(**ask)["text"]
    done = threading.Event()

    def victim() -> list[str]:
        seen = []
        while not done.is_set() or not seen:
            seen.append("".join(chunk["choices"][0]["text"] for chunk in server.stream(**ask)))
        return seen

    with ThreadPoolExecutor(1) as pool:
        victims = pool.submit(victim)
        try:
            for body in BAD:
                for stream in (False, True):
                    response = server.post(TEXTS, **body, stream=stream)
                    assert response.status_code == 400, (body, response.text)
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        finally:
            done.set()
        assert set(victims.result()) == {want}
    settled(server)


def test_clients_that_leave_free_everything(server: Octavo) -> None:
    def leave(i: int) -> None:
        body = {
            "prompt": tiny.PROMPTS[i % 3],
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": i % 2 == 0,
            "n": 1 + i % 2,
        }
        with contextlib.suppress(httpx.TimeoutException):
            timeout = httpx.Timeout(30, read=0.01 * (1 + i % 4))
            with server.client.stream("POST", TEXTS, json=body, timeout=timeout) as response:
                for _ in zip(response.iter_lines(), range(i % 5), strict=False):
                    pass

    for _ in range(2):
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(leave, range(24)))
        settled(server)
    assert server.text(ignore_eos=True, return_token_ids=True)["token_ids"] == tiny.greedy("llama", 0)[:48]


def test_counters_add_up(server: Octavo) -> None:
    before = settled(server)
    lengths = [1, 7, 20, 33]
    for length in lengths:
        server.stream(max_tokens=length, ignore_eos=True)
    after = settled(server)
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["octavo:generation_tokens_total"] == sum(lengths)
    assert change["octavo:prompt_tokens_total"] == len(tiny.PROMPTS[0]) * len(lengths)
    assert change["octavo:request_success_total/length"] == len(lengths)
    assert change["octavo:time_to_first_token_seconds_count"] == len(lengths)
    assert change["octavo:request_queue_time_seconds_count"] == len(lengths)


def test_engine_killed() -> None:
    with octavo("--kv-cache-memory-bytes", "4MiB") as server:
        [engine] = _children(server.child.pid)
        got: list[list[dict[str, Any]]] = []
        ask = {"prompt": [tiny.PROMPTS[0]] * 16, "max_tokens": 240, "ignore_eos": True, "n": 8}
        thread = threading.Thread(target=lambda: got.append(server.stream(**ask)))
        thread.start()
        while not server.metrics()["octavo:num_requests_running"]:
            time.sleep(0.002)
        assert server.client.get("/health").status_code == 200
        os.kill(engine, signal.SIGKILL)
        start = time.monotonic()
        thread.join(20)
        assert got[0][-1]["error"]["code"] == "engine_dead"
        assert server.client.get("/health").status_code == 503
        assert server.post(TEXTS, prompt="a").status_code == 503
        assert time.monotonic() - start < 5
        server.child.send_signal(signal.SIGTERM)
        assert server.child.wait(20) == 0


@pytest.mark.parametrize("everybody", [False, True])
def test_sigterm_drains_and_exits_0(everybody: bool) -> None:
    """Whether the server alone is told, or its engine too, as by systemd unless its unit says otherwise."""
    with octavo("--kv-cache-memory-bytes", "4MiB") as server:
        got: list[list[dict[str, Any]]] = []
        thread = threading.Thread(target=lambda: got.append(server.stream(max_tokens=240, ignore_eos=True)))
        thread.start()
        while not server.metrics()["octavo:num_requests_running"]:
            time.sleep(0.002)
        for pid in [*(_children(server.child.pid) if everybody else ()), server.child.pid]:
            os.kill(pid, signal.SIGTERM)
        thread.join(30)
        assert got[0][-1]["choices"][0]["finish_reason"] == "length"
        assert server.child.wait(20) == 0


def _children(pid: int) -> list[int]:
    """Engine processes of a server (its other children only watch shared resources)."""
    import psutil

    return [p.pid for p in psutil.Process(pid).children() if "resource_tracker" not in " ".join(p.cmdline())]


def test_the_memory_and_the_blocks_are_told() -> None:
    settings = ["--enable-kv-debug", "--kv-cache-memory-bytes", "1MiB", "--swap-space", "0.001"]
    with octavo(*settings) as server:
        before = server.client.get("/debug/kv.json").json()
        assert before["counts"] == {"free": before["num_blocks"], "cached": 0, "owned": 0, "shared": 0}
        assert before["num_blocks"] * before["block_bytes"] <= 1 << 20
        assert before["host_blocks"] > 0 and set(before["host_cells"]) == {"0"}
        for _ in range(2):
            server.text()
        after = server.client.get("/debug/kv.json").json()
        assert after["counts"]["cached"] > 0 and after["counts"]["owned"] == 0
        assert sum(after["counts"].values()) == after["num_blocks"] == before["num_blocks"]
        held = {
            sample.labels["kind"]: sample.value
            for family in text_string_to_metric_families(server.client.get("/metrics").text)
            for sample in family.samples
            if sample.name == "octavo:memory_bytes"
        }
        assert held["kv_cache"] == before["num_blocks"] * before["block_bytes"]
        assert held["host_cache"] == before["host_blocks"] * before["block_bytes"]
        device = sum(value for kind, value in held.items() if kind not in ("total", "host_cache"))
        assert device == held["total"]
        assert server.metrics()["octavo:kv_blocks"] == before["num_blocks"]
