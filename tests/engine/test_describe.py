"""What the engine core tells of its requests: their states, lengths and order, after every kind of step."""

from __future__ import annotations

import asyncio

from octavo.async_llm import AsyncLLM
from octavo.messages import KVMap
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests import tiny


async def _run() -> tuple[list[KVMap], dict[str, list[int]]]:
    engine = await AsyncLLM.create(
        str(tiny.checkpoint("llama")), device="cpu", dtype="float32", num_threads=1, max_num_seqs=2,
        check_invariants=True, kv_cache_memory_bytes=8 << 20,
    )  # fmt: skip
    seen: dict[str, list[int]] = {}

    async def ask(name: str, length: int) -> None:
        prompt = [5 + i % 40 for i in range(length)]
        params = SamplingParams(
            temperature=0, max_tokens=tiny.CONTEXT - length, ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        async for out in engine.generate(prompt, params, name):
            seen.setdefault(name, []).extend(out.outputs[0].token_ids)

    maps = []
    async with engine:
        maps.append(await engine.describe_kv(8, requests=9))
        tasks = []
        for name, length in (("a", 20), ("b", 35), ("c", 9)):
            tasks.append(asyncio.create_task(ask(name, length)))
            await asyncio.sleep(0)
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        maps.append(await engine.describe_kv(8, requests=9, tokens=4))
        maps.append(await engine.describe_kv(8, requests=1))
        maps.append(await engine.describe_kv(8))
        await asyncio.gather(*tasks)
        maps.append(await engine.describe_kv(8, requests=9))
    return maps, seen


def test_requests_are_told_as_they_are() -> None:
    (before, during, first, none, after), seen = asyncio.run(_run())
    assert before.requests == [] and after.requests == [] and none.requests == []
    assert [len(tokens) for tokens in seen.values()] == [tiny.CONTEXT - n for n in (20, 35, 9)]
    a, b, c = during.requests
    for one, name, length in ((a, "a", 20), (b, "b", 35), (c, "c", 9)):
        assert one.request_id.startswith(name) and one.num_prompt_tokens == length
        assert one.max_tokens == tiny.CONTEXT - length and one.arrival_time > 0
        assert one.prompt_tail == [5 + i % 40 for i in range(length)][-4:]
        known = seen[name][: one.num_output_tokens]
        assert one.output_tail == known[-4:]
    assert (a.state, b.state, c.state) == ("running", "running", "waiting")
    assert a.num_output_tokens > 0 and a.num_computed_tokens >= 20 + a.num_output_tokens - 1
    assert c.num_output_tokens == c.num_computed_tokens == 0
    assert (during.num_running, during.num_waiting) == (2, 1)
    assert len(first.requests) == 1 and first.requests[0].request_id == a.request_id
    assert first.requests[0].prompt_tail == []
