"""Processes are killed at random under load: every request ends, in its right answer or in an error."""

from __future__ import annotations

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
VICTIMS = ("server", "engine", "rank 0", "rank 1")


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
def test_whatever_process_is_killed_every_request_ends(seed):
    rng = random.Random(seed)
    victim = VICTIMS[seed % len(VICTIMS)]
    # A stopped rank is no dead one; nobody watches whether the engine itself is stopped.
    how = rng.choice((signal.SIGKILL, signal.SIGSTOP)) if "rank" in victim else signal.SIGKILL
    for prompt in range(len(tiny.PROMPTS)):
        tiny.greedy("llama", prompt)
    arguments = ("--tensor-parallel-size", "2", "--restart-engine", "--distributed-heartbeat-seconds", "3")
    with running(str(tiny.checkpoint("llama")), *arguments, "--max-num-seqs", "16") as (child, _, client):
        server = psutil.Process(child.pid)
        engine, ranks = server.children()[0], sorted(ranks_of(child.pid), key=lambda p: p.pid)
        doomed = {"server": server, "engine": engine, "rank 0": ranks[0], "rank 1": ranks[1]}[victim]
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
            doomed.send_signal(how)
            told = [end.result(timeout=120) for end in ends]
        assert told.count("right") >= after - 1  # what was answered before
        assert victim == "server" or "connection" not in told
        await_end([engine, *ranks])
        if victim == "server":
            assert "connection" in told
            return
        end = time.monotonic() + 60
        while client.get("/health").status_code != 200:
            assert time.monotonic() < end, "the engine does not come back"
            time.sleep(0.1)
        assert [ask(client, number) for number in range(10)] == ["right"] * 10
        living = [engine for engine in server.children() if engine.status() != psutil.STATUS_ZOMBIE]
        assert len(living) == 1 and len(ranks_of(child.pid)) == 2
        left = [*living, *ranks_of(child.pid)]
    await_end(left)
