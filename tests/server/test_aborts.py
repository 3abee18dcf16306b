"""Clients of a real engine that leave at any stage: within 5 seconds nothing of them is left."""

from __future__ import annotations

import asyncio
import random

import httpx

from tests import tiny
from tests.server.test_real_engine import TEXTS, octavo, settled

REQUESTS, ROUNDS, TOKENS = 50, 20, 100
POOL_TOKENS = 272  # 17 blocks of 16
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4


async def leave(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Ask for a long answer, and go away: while it is queued, in prefill or in decode."""
    body = {
        "prompt": [rng.randrange(5, tiny.VOCAB_SIZE) for _ in range(rng.randint(1, 120))],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
    }
    async with client.stream("POST", TEXTS, json=body) as response:
        assert response.status_code == 200
        async for _ in response.aiter_lines():
            pass


async def one_round(url: str, rng: random.Random) -> int:
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as client:
        tasks = [asyncio.create_task(leave(client, rng)) for _ in range(REQUESTS)]
        for task in tasks:
            asyncio.get_running_loop().call_later(rng.uniform(0.01, 0.4), task.cancel)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
    return sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)


def test_50_clients_leave_20_times_and_most_of_the_pool_is_there_for_the_next():
    rng = random.Random(2)
    with octavo(
        "--kv-cache-memory-bytes", str(POOL_TOKENS * BYTES_PER_TOKEN), "--max-num-seqs", "8"
    ) as server:
        left = 0
        for _ in range(ROUNDS):
            left += asyncio.run(one_round(str(server.client.base_url), rng))
            found = settled(server)
        assert left > REQUESTS * ROUNDS / 2
        # Who has left is not answered to the end by an engine that nobody told.
        generated = found["octavo:generation_tokens_total"]
        assert generated < TOKENS * (REQUESTS * ROUNDS - left + 0.9 * left)
        choice = server.text(max_tokens=245, ignore_eos=True, return_token_ids=True)
        assert choice["usage"]["total_tokens"] - 1 > 0.9 * POOL_TOKENS
        assert choice["token_ids"][:48] == tiny.greedy("llama", 0)[:48]


def test_texts_that_were_to_be_embedded_are_dropped_with_their_clients():
    texts = [[5 + i] * 200 for i in range(200)]

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            tasks = [
                asyncio.create_task(client.post("/v1/embeddings", json={"input": texts})) for _ in "1234"
            ]
            await asyncio.sleep(0.3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    settings = ["--runner", "pooling", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]
    with octavo("--kv-cache-memory-bytes", "4MiB", *settings) as server:
        asyncio.run(ask(str(server.client.base_url)))
        found = settled(server)
        assert found["octavo:prompt_tokens_total"] < 4 * 200 * 200 / 2
        assert server.post("/v1/embeddings", input=texts[:1]).json()["usage"]["prompt_tokens"] == 200
