"""A server's memory stays what it is, whatever is asked of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.test_real_engine import CHAT, MESSAGES, TEXTS, Octavo, octavo, settled

pytestmark = pytest.mark.slow
MIB = 1 << 20


def process_tree(pid: int) -> list[int]:
    """A process and all that it has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for one in lists for child in one.read_text().split()]
    return [pid, *(found for child in children for found in process_tree(child))]


def memory(pid: int) -> int:
    """Bytes that a process holds in memory of its own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "Swap:"))) << 10


def hang_up(server: Octavo) -> None:
    with server.client.stream("POST", TEXTS, json={"prompt": "a b c", "max_tokens": 60, "stream": True}) as r:
        next(r.iter_lines())


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_a_thousand_requests() -> None:
    """Of all kinds, by 16 clients at once, new prompts and cached ones, a sixth hung up, a sixth wrong."""
    with octavo("--kv-cache-memory-bytes", "1MiB", "--max-num-seqs", "16") as server:
        fresh = random.Random(7)

        def prompt() -> list[int]:
            return [fresh.randrange(5, 300) for _ in range(fresh.randrange(2, 60))]

        kinds: list[Callable[[], object]] = [
            lambda: server.text(prompt=prompt(), max_tokens=12),
            lambda: server.stream(prompt=[7] * 40, max_tokens=12, n=2, temperature=0.7),
            lambda: server.post(CHAT, messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=5),
            lambda: server.text(prompt=prompt(), max_tokens=4, echo=True, logprobs=2),
            lambda: hang_up(server),
            lambda: server.post(TEXTS, prompt="x", max_tokens=-1),
        ]
        held = {}
        with ThreadPoolExecutor(16) as clients:
            for done in (100, 300, 1000):
                list(clients.map(lambda i: kinds[i % len(kinds)](), range(max(held, default=0), done)))
                settled(server)
                held[done] = [memory(pid) for pid in process_tree(server.child.pid)]
        assert len(held[100]) == len(held[1000]) >= 2  # the API's process and the engine's
        # The first hundreds still meet new numbers of rows, for each of which the matrix library keeps code.
        for since, bound in ((100, 40), (300, 10)):
            growth = [(b - a) / MIB for a, b in zip(held[since], held[1000], strict=True)]
            assert max(growth) < bound, {n: [size >> 20 for size in sizes] for n, sizes in held.items()}
