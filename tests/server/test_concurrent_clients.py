"""Many streaming clients at once, some of which hang up: nothing leaks, the others' answers are unharmed."""

from __future__ import annotations

import asyncio
import random

import openai
import pytest

from tests import tiny
from tests.server.test_real_engine import octavo, settled

CLIENTS, ROUNDS, TOKENS = 64, 10, 24


def prompt(client: int) -> list[int]:
    rng = random.Random(client)
    return [rng.randrange(len(tiny.SPECIAL_TOKENS), tiny.VOCAB_SIZE) for _ in range(rng.randint(3, 90))]


async def ask(api: openai.AsyncOpenAI, client: int, leave_after: float | None) -> str | None:
    """A greedy answer, or None when the client left after so many chunks (a fraction: before the first)."""
    stream = await api.completions.create(
        model="tiny", prompt=prompt(client), max_tokens=TOKENS, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    text, seen = "", 0
    async for chunk in stream:
        text += chunk.choices[0].text
        seen += 1
        if leave_after is not None and seen > leave_after:
            await stream.close()
            return None
    return text


async def one_round(base_url: str, number: int, alone: dict[int, str]) -> int:
    rng = random.Random(number)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as api:
        leaving = {c: rng.uniform(-1, TOKENS / 2) for c in range(CLIENTS) if rng.random() < 1 / 3}
        tasks = {}
        for client in range(CLIENTS):
            task = tasks[client] = asyncio.create_task(ask(api, client, leaving.get(client)))
            if leaving.get(client, 0) < 0:  # hangs up before the first chunk, or in the queue
                asyncio.get_running_loop().call_later(rng.uniform(0, 0.5), task.cancel)
        answers = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for client, answer in zip(tasks, answers, strict=True):
        if client not in leaving:
            assert answer == alone[client], f"client {client} of round {number}: {answer!r}"
    return len(leaving)


async def lone_answers(base_url: str) -> dict[int, str]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
        found = {}
        for client in range(CLIENTS):
            answer = await ask(api, client, None)
            assert answer is not None
            found[client] = answer
        return found


@pytest.mark.parametrize("flags", [(), ("--async-scheduling",)], ids=["plain", "overlap"])
def test_a_third_of_64_clients_hang_up_ten_times(flags):
    # Room for about a third of the requests: some wait, and some are preempted.
    room = ("--kv-cache-memory-bytes", "1MiB", "--no-look-ahead-admission")
    with octavo(*room, "--max-num-seqs", "48", *flags) as server:
        base_url = f"{server.client.base_url}/v1"
        alone = asyncio.run(lone_answers(base_url))
        assert len(set(alone.values())) > CLIENTS / 2
        left = sum(asyncio.run(one_round(base_url, number, alone)) for number in range(ROUNDS))
        assert left > CLIENTS * ROUNDS / 5
        settled(server)
        after = server.text(prompt=prompt(0), max_tokens=TOKENS, ignore_eos=True)
        assert after["text"] == alone[0]
