"""Processes are killed at random under load: every request ends, in its right answer or in an error."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests import tiny
from tests.parallel.test_ranks import await_end, ranks_of
from tests.server.running import running

REQUESTS = 200
LAYOUTS = [(2, 1), (1, 2), (2, 2)]  # ranks of a stage, and stages


def ask(client: httpx.Client, number: int) -> str:
    """How a request ended: "right", or the error's type."""
    prompt, count = number % len(tiny.PROMPTS), 4 + number % 40
    body = dict(prompt=tiny.PROMPTS[prompt], max_tokens=count, temperature=0, ignore_eos=True)
    try:
        answer = client.post("/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
    except httpx.TimeoutException:
        raise AssertionError(f"request {number} hangs") from None
    except httpx.TransportError:
        return "connection"
    if answer.status_code != 200:
        assert answer.status_code in (500, 503), answer.text
        return answer.json()["error"]["type"]
    assert answer.json()["choices"][0]["token_ids"] == tiny.greedy("llama", prompt)[:count]
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("tensor, stages", LAYOUTS)
def test_whatever_process_is_killed_every_request_ends(tensor, stages, seed, tmp_path, monkeypatch):
    rng, size = random.Random(seed), tensor * stages
    victim = ("server", "engine", *(f"rank {number}" for number in range(size)))[seed % (2 + size)]
    # A stopped process is no dead one; nobody watches the server.
    how = signal.SIGKILL if victim == "server" else rng.choice((signal.SIGKILL, signal.SIGSTOP))
    for prompt in range(len(tiny.PROMPTS)):
        tiny.greedy("llama", prompt)
    folder = str(tiny.checkpoint("llama"))
    arguments = (
        *("--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(stages)),
        *("--restart-engine", "--distributed-heartbeat-seconds", "3", "--engine-timeout", "3"),
        *("--max-num-seqs", "16"),
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    with running(folder, *arguments) as (child, _, client):
        server = psutil.Process(child.pid)
        engine, ranks = server.children()[0], sorted(ranks_of(child.pid), key=lambda p: p.pid)
        assert len(ranks) == size
        doomed = {"server": server, "engine": engine} | {f"rank {i}": rank for i, rank in enumerate(ranks)}
        answered, after = threading.Semaphore(0), rng.randrange(5, REQUESTS * 3 // 4)

        def one(number: int) -> str:
            try:
                return ask(client, number)
            finally:
                answered.release()

        with ThreadPoolExecutor(24) as pool:
            ends = [pool.submit(one, number) for number in range(REQUESTS)]
            for _ in range(after):
                assert answered.acquire(timeout=120)
            doomed[victim].send_signal(how)
            told = [end.result(timeout=120) for end in ends]
        assert told.count("right") >= after - 1  # what was answered before
        assert victim == "server" or "connection" not in told
        await_end([engine, *ranks])
        if victim == "server":
            assert "connection" in told
            with pytest.raises(httpx.ConnectError):  # nobody holds its socket
                client.get("/health")
        else:
            end = time.monotonic() + 60
            while client.get("/health").status_code != 200:
                assert time.monotonic() < end, "the engine does not come back"
                time.sleep(0.1)
            assert [ask(client, number) for number in range(10)] == ["right"] * 10
            living = [p for p in server.children() if p.status() != psutil.STATUS_ZOMBIE]
            ranks = ranks_of(child.pid)
            assert len(living) == 1 and len(ranks) == size
            engine = living[0]
    await_end([engine, *ranks])
    assert not list(tmp_path.iterdir())
    assert set(os.listdir("/dev/shm")) <= shared
