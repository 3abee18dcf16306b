"""The engine's process is killed or stands still under a server; disks are full: what clients see."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

from tests import tiny
from tests.server.test_real_engine import TEXTS, Octavo, octavo, settled


def engine_of(server: Octavo) -> int:
    """The process id of the engine core."""
    found = subprocess.run(["pgrep", "-P", str(server.child.pid)], capture_output=True, text=True, check=True)
    [pid] = found.stdout.split()
    return int(pid)


def test_streams_end_with_an_error_and_what_is_queued_goes_on() -> None:
    with octavo("--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "4", "--restart-engine") as server:
        began, lines, whole = threading.Semaphore(0), dict[int, list[str]](), dict[int, httpx.Response]()
        body: dict[str, Any] = {"max_tokens": 190, "temperature": 0, "ignore_eos": True}

        def stream(number: int) -> None:
            ask = body | {"prompt": tiny.PROMPTS[0], "stream": True}
            with server.client.stream("POST", TEXTS, json=ask) as response:
                for line in response.iter_lines():
                    if line:
                        if not lines.setdefault(number, []):
                            began.release()
                        lines[number].append(line)

        def wait(number: int) -> None:
            ask = body | {"prompt": tiny.PROMPTS[number % 3], "max_tokens": 40, "return_token_ids": True}
            whole[number] = server.client.post(TEXTS, json=ask)

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert began.acquire(timeout=30)
        late = [threading.Thread(target=wait, args=(i,)) for i in range(6)]
        for thread in late:
            thread.start()
        engine = engine_of(server)
        os.kill(engine, signal.SIGKILL)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a client hangs"
        for told in lines.values():
            assert told[-1] == "data: [DONE]"
            end = json.loads(told[-2].removeprefix("data: "))
            if "error" in end:
                assert end["error"]["code"] == "engine_restarting"
            else:  # finished before the kill; a slow client gets several tokens in one piece
                assert end["choices"][0]["finish_reason"] == "length"
        ready = server.client.get("/ready")
        assert ready.status_code == 503 and ready.headers["retry-after"] == "10"
        assert server.client.get("/health").status_code == 503
        refused = server.client.post(TEXTS, json={"prompt": "a"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_restarting"
        for thread in late:
            thread.join(100)
            assert not thread.is_alive(), "a client hangs"
        served = [i for i, answer in whole.items() if answer.status_code == 200]
        assert len(whole) == 6 and served
        for i in served:
            assert whole[i].json()["choices"][0]["token_ids"] == tiny.greedy("llama", i % 3)[:40]
        for answer in whole.values():
            assert answer.status_code in (200, 503), answer.text
        until = time.monotonic() + 60
        while server.client.get("/ready").status_code != 200 and time.monotonic() < until:
            time.sleep(0.1)
        assert engine_of(server) != engine
        assert (
            server.text(return_token_ids=True, ignore_eos=True)["token_ids"] == tiny.greedy("llama", 0)[:48]
        )
        settled(server)


def test_a_process_that_stands_still_is_told_ended_and_replaced() -> None:
    """SIGSTOP: streams end with an error, /health tells why, counters go on, the next engine serves."""
    options = ("--kv-cache-memory-bytes", "8MiB", "--restart-engine", "--engine-timeout", "2")
    with octavo(*options) as server:
        first = server.text(return_token_ids=True, ignore_eos=True)["token_ids"]
        assert first == tiny.greedy("llama", 0)[: len(first)]
        before = server.metrics()
        assert before["octavo:generation_tokens_total"] >= len(first)
        engine, last = engine_of(server), ""
        ask = {"prompt": tiny.PROMPTS[0], "max_tokens": 190, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", TEXTS, json=ask) as response:
            for number, line in enumerate(filter(None, response.iter_lines())):
                if number == 2:
                    os.kill(engine, signal.SIGSTOP)
                if "error" in line:
                    last = line
                    health = server.client.get("/health")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_restarting"
        assert health.status_code == 503 and "it hung: it has given no sign of life for" in health.text
        down = server.metrics()
        assert down["octavo:generation_tokens_total"] >= before["octavo:generation_tokens_total"]
        until = time.monotonic() + 60
        while server.client.get("/ready").status_code != 200 and time.monotonic() < until:
            time.sleep(0.1)
        assert engine_of(server) != engine
        again = server.text(return_token_ids=True, ignore_eos=True)["token_ids"]
        assert again == first
        settled(server)
        after = server.metrics()
        for name in ("generation_tokens", "prompt_tokens", "prefix_cache_queries"):
            name = f"octavo:{name}_total"
            assert after[name] > before[name] > 0, name
        assert after["octavo:engine_up"] == 1


def test_a_full_disk_for_all_that_is_written_ends_nothing() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "octavo", "serve", str(tiny.checkpoint("llama")), "--port", str(port),
        "--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--kv-cache-memory-bytes", "8MiB",
        "--access-log", "/dev/full",
    ]  # fmt: skip
    with open("/dev/full", "wb") as full:
        child = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            until, status = time.monotonic() + 60, 0
            while status != 200:
                assert child.poll() is None and time.monotonic() < until
                time.sleep(0.1)
                with contextlib.suppress(httpx.ConnectError):
                    status = client.get("/ready").status_code
            body = {"prompt": tiny.PROMPTS[0], "max_tokens": 4, "no_such_field": 1, "return_token_ids": True}
            answer = client.post(TEXTS, json=body | {"temperature": 0, "ignore_eos": True})
            assert answer.json()["choices"][0]["token_ids"] == tiny.greedy("llama", 0)[:4]
            assert client.get("/health").status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
