"""Known traffic against a real engine: every count is what was sent, and gauges go back to 0."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from octavo.server.metrics.throughput import Throughput
from tests import tiny
from tests.server.test_real_engine import TEXTS, Octavo, octavo, settled

PROMPT = tiny.PROMPTS[0]


def info(server: Octavo, name: str) -> dict[str, str]:
    """The labels of a metric that has one sample."""
    text = server.client.get("/metrics").text
    [labels] = [s.labels for f in text_string_to_metric_families(text) for s in f.samples if s.name == name]
    return labels


def abort_stream(server: Octavo, tokens: int, **body: Any) -> int:
    """Read some tokens of a long stream and hang up; the tokens that were read."""
    ask = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True, "return_token_ids": True}
    read = 0
    with httpx.Client(base_url=server.client.base_url, timeout=60, trust_env=False) as client:
        with client.stream("POST", TEXTS, json=ask | body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    read += 1
                if read >= tokens:
                    break
    return read


def test_every_count_is_what_was_sent() -> None:
    """20 requests that finish, 3 that hang up while they run, 2 that are refused."""
    with octavo("--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "16") as server:
        whole, streamed, double = range(1, 9), range(9, 17), (3, 5, 7, 9)
        # With a prompt each, so that the prefix cache serves none but what is asked for below.
        prompts = [[5 + i, 6 + i, *PROMPT] for i in range(20)]
        sent = iter(prompts)
        for length in whole:
            answer = server.text(prompt=next(sent), max_tokens=length, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == length
        for length in streamed:
            server.stream(prompt=next(sent), max_tokens=length, ignore_eos=True)
        for length in double:
            server.stream(prompt=next(sent), max_tokens=length, ignore_eos=True, n=2)
        for body in ({"prompt": [-1]}, {"prompt": PROMPT, "max_tokens": -1}):
            assert server.post(TEXTS, **body).status_code == 400
        finished = settled(server)
        seen = [abort_stream(server, 4) for _ in range(3)]
        found = settled(server)

    prompt_tokens = sum(len(p) for p in prompts) + sum(len(p) for p in prompts[16:])
    generated = sum(whole) + sum(streamed) + 2 * sum(double)
    expected = {
        "request_success_total/length": 16 + 4 * 2,
        "request_success_total/stop": 0,
        "request_success_total/error": 0,
        "time_to_first_token_seconds_count": 20,
        "e2e_request_latency_seconds_count": 20,
        "request_queue_time_seconds_count": 20,
        "request_prefill_time_seconds_count": 20,
        "request_decode_time_seconds_count": 20,
        "request_inference_time_seconds_count": 20,
        "request_prompt_tokens_sum": sum(len(p) for p in prompts),
        "request_generation_tokens_count": 20,
        "request_generation_tokens_sum": generated,
        "request_max_num_generation_tokens_sum": sum(whole) + sum(streamed) + sum(double),
        "request_params_n_sum": 16 + 4 * 2,
        "request_params_n_count": 20,
        "request_params_max_tokens_sum": sum(whole) + sum(streamed) + sum(double),
        # Every token of a choice but its first, streamed or not.
        "inter_token_latency_seconds_count": generated - (16 + 4 * 2),
        # One token leaves no time between tokens.
        "request_time_per_output_token_seconds_count": 20 - 1,
        "prompt_tokens_total": prompt_tokens,
        "generation_tokens_total": generated,
        "prefix_cache_queries_total": prompt_tokens,
        "num_preemptions_total": 0,
    }
    assert {name: finished[f"octavo:{name}"] for name in expected} == expected
    cached = finished["octavo:prompt_tokens_cached_total"]
    assert cached == finished["octavo:prefix_cache_hits_total"]
    # A step computes what no cache had, and of every choice all tokens but the last.
    choices = 16 + 4 * 2
    assert finished["octavo:iteration_tokens_total_sum"] == prompt_tokens - cached + generated - choices
    computed = finished["octavo:request_prefill_kv_computed_tokens_sum"]
    assert 0 < computed <= sum(len(p) for p in prompts)

    change = {name: found[name] - finished[name] for name in finished}
    assert change["octavo:request_success_total/abort"] == 3
    assert change["octavo:request_success_total/length"] == 0
    assert change["octavo:time_to_first_token_seconds_count"] == 3
    assert change["octavo:e2e_request_latency_seconds_count"] == 0
    assert sum(seen) <= change["octavo:generation_tokens_total"] < 3 * 200


def test_cached_tokens_and_the_cache_s_settings() -> None:
    with octavo("--kv-cache-memory-bytes", "1MiB", "--metrics-prefix", "vllm") as server:
        prompt = list(range(20, 20 + 40))
        for _ in range(3):
            server.text(prompt=prompt, max_tokens=2, ignore_eos=True)
        found = server.metrics()
        assert found["vllm:prompt_tokens_cached_total"] == 2 * 32  # whole blocks of 16 before the last token
        assert found["vllm:prompt_tokens_total"] == 3 * 40
        assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 40 + 8 + 8
        assert found["vllm:engine_up"] == 1
        assert not [name for name in found if name.startswith("octavo:")]
        labels = info(server, "vllm:cache_config_info")
        assert labels["block_size"] == "16" and labels["enable_prefix_caching"] == "True"
        assert float(labels["num_gpu_blocks"]) == found["vllm:kv_blocks"] > 0


def test_requests_that_wait_are_counted() -> None:
    with octavo("--kv-cache-memory-bytes", "4MiB", "--max-num-seqs", "1") as server:
        asked: list[object] = []
        seen = threading.Event()

        def ask() -> None:  # again until it was seen: an engine may be quicker than who looks
            while not seen.is_set():
                asked.append(server.post(TEXTS, prompt=[PROMPT] * 4, max_tokens=200, ignore_eos=True))

        thread = threading.Thread(target=ask)
        thread.start()
        until = time.monotonic() + 20
        running = waiting = 0.0
        while (running, waiting) != (1, 3) and time.monotonic() < until:
            found = server.metrics()
            running, waiting = found["octavo:num_requests_running"], found["octavo:num_requests_waiting"]
        seen.set()
        thread.join(60)
        assert (running, waiting) == (1, 3)
        assert settled(server)["octavo:request_success_total/length"] == 4 * len(asked)


def test_rates_are_over_ten_seconds_at_least() -> None:
    now = [0.0]
    throughput = Throughput(lambda: now[0])
    assert throughput.rates(100, 0) == (0.0, 0.0)
    now[0] = 4.0
    assert throughput.rates(140, 8) == (10.0, 2.0)  # no reading is old enough: since the first
    now[0] = 14.0
    assert throughput.rates(140, 28) == (0.0, 2.0)  # since the one at 4
    now[0] = 15.0
    assert throughput.rates(140, 28)[1] == 20 / 11
    now[0] = 60.0
    assert throughput.rates(140, 28) == (0.0, 0.0)
    now[0] = 61.0
    assert throughput.rates(5, 5) == (0.0, 0.0)  # another engine
    now[0] = 63.0
    assert throughput.rates(9, 5) == (2.0, 0.0)
