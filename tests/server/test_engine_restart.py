"""The engine's process is killed under a server that starts it again: what clients see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
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
            if len(told) < 190:  # not finished before the kill
                assert json.loads(told[-2].removeprefix("data: "))["error"]["code"] == "engine_restarting"
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
