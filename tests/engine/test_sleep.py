"""Engines that sleep: memory goes and comes back, tokens stay, requests wait, end or are refused."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.errors import EngineAsleepError, RequestAbortedError, RequestError, RequestFailedError
from tests import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, Any] = dict(
    dtype="float32", device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 20, check_invariants=True
)


def tokens(llm: LLM) -> list[int]:
    [output] = llm.generate(tiny.PROMPTS[0], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def cached(llm: LLM) -> int:
    return llm.generate(tiny.PROMPTS[0], GREEDY, use_tqdm=False)[0].num_cached_tokens


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_tokens_are_the_same_after_sleep(level: int, kind: str) -> None:
    want = tiny.greedy(kind, 0)[:24]
    with LLM(str(tiny.checkpoint(kind)), **SETTINGS) as llm:
        assert tokens(llm) == want
        facts = llm.facts
        for _ in range(2):
            status = llm.sleep(level)
            weights = facts.memory["weights"]
            assert status.level == level
            assert status.freed_bytes == facts.memory["kv_cache"] + (weights if level == 2 else 0)
            with pytest.raises(EngineAsleepError, match="wake_up"):
                tokens(llm)
            with pytest.raises(RequestError, match="sleeps already"):
                llm.sleep()
            assert llm.wake_up().level == 0
            assert cached(llm) == 0 and tokens(llm) == want
        with pytest.raises(RequestError, match="awake"):
            llm.wake_up()


@pytest.mark.parametrize("level", [1, 2])
def test_keys_of_an_fp8_cache_are_stored_as_before(level: int) -> None:
    """Scales and centres are there again, to the bit that the root of block keys tells."""
    with LLM(str(tiny.checkpoint("qwen2")), kv_cache_dtype="fp8", **SETTINGS) as llm:
        assert "keys centred" in llm.facts.summary["kv cache"]
        want = tokens(llm)
        llm.sleep(level)
        llm.wake_up()
        assert cached(llm) == 0 and tokens(llm) == want


def test_memory_is_given_back_to_the_system() -> None:
    process = psutil.Process()
    with LLM(str(tiny.checkpoint("llama")), **SETTINGS | {"kv_cache_memory_bytes": 64 << 20}) as llm:
        # Blocks cost memory once they are written.
        runs = [[5 + i % 200] * 200 for i in range(600)]
        llm.generate(runs, SamplingParams(max_tokens=1), use_tqdm=False)
        full = process.memory_info().rss
        freed = llm.sleep().freed_bytes
        gc.collect()
        assert freed > 30 << 20
        # Not all: other tests' memory comes and goes in the same process.
        assert full - process.memory_info().rss > 0.2 * min(freed, 600 * 200 * 512)
        llm.wake_up()
        assert tokens(llm) == tiny.greedy("llama", 0)[:24]


def test_an_engine_that_cannot_wake_up_sleeps_on(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    with LLM(str(folder), **SETTINGS) as llm:
        want = tokens(llm)
        llm.sleep(2)
        away = [(path, path.rename(tmp_path / path.name)) for path in folder.glob("*.safetensors")]
        assert away
        with pytest.raises(RequestFailedError, match="cannot wake up"):
            llm.wake_up()
        with pytest.raises(EngineAsleepError):
            tokens(llm)
        for path, place in away:
            place.rename(path)
        llm.wake_up()
        assert tokens(llm) == want


def test_closed_while_asleep() -> None:
    for level in (1, 2):
        llm = LLM(str(tiny.checkpoint("llama")), **SETTINGS)
        llm.sleep(level)
        llm.close()


def test_what_cannot_sleep_says_so() -> None:
    with LLM(str(tiny.checkpoint("llama")), **SETTINGS, swap_space=0.001) as llm:
        with pytest.raises(RequestError, match="swap_space"):
            llm.sleep()
        assert tokens(llm) == tiny.greedy("llama", 0)[:24]
        with pytest.raises(RequestError, match="level=3"):
            llm.sleep(3)


def test_an_engine_of_embeddings_sleeps() -> None:
    with LLM(str(tiny.checkpoint("llama")), **SETTINGS, runner="pooling") as llm:
        before = llm.embed([tiny.PROMPTS[0]], use_tqdm=False)[0].outputs.embedding
        llm.sleep(2)
        with pytest.raises(EngineAsleepError):
            llm.embed([tiny.PROMPTS[0]], use_tqdm=False)
        llm.wake_up()
        assert llm.embed([tiny.PROMPTS[0]], use_tqdm=False)[0].outputs.embedding == before


def test_an_engine_that_waits_for_requests_can_be_woken_up() -> None:
    """Before it sleeps; it must not do so later, when its last request ends."""

    async def main() -> None:
        async with await AsyncLLM.create(str(tiny.checkpoint("llama")), **SETTINGS) as llm:

            async def run() -> int:
                count = 0
                async for output in llm.generate(tiny.PROMPTS[0], GREEDY.clone(max_tokens=200)):
                    count = len(output.outputs[0].token_ids)
                return count

            runs = [asyncio.ensure_future(run())]
            while not llm.num_unfinished:
                await asyncio.sleep(0.001)
            sleep = asyncio.ensure_future(llm.sleep())
            await asyncio.sleep(0)
            assert llm.is_sleeping
            with pytest.raises(RequestError, match="about to"):
                await llm.sleep()
            assert (await llm.wake_up()).level == 0 and not llm.is_sleeping
            runs.append(asyncio.ensure_future(run()))
            with pytest.raises(RequestError, match="woken up before it slept"):
                await sleep
            assert await asyncio.gather(*runs) == [200, 200]
            assert not llm.is_sleeping
            with pytest.raises(RequestError, match="is awake"):
                await llm.wake_up()
            assert (await llm.sleep()).level == 1 and llm.is_sleeping
            await llm.wake_up()
            assert await run() == 200

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_under_way(mode: str) -> None:
    async def main() -> None:
        async with await AsyncLLM.create(str(tiny.checkpoint("llama")), **SETTINGS) as llm:
            params = GREEDY.clone(max_tokens=200)

            async def run() -> list[int]:
                found: list[int] = []
                async for output in llm.generate(tiny.PROMPTS[0], params):
                    found = output.outputs[0].token_ids
                return found

            runs = [asyncio.ensure_future(run()) for _ in range(3)]
            until = time.monotonic() + 10
            while llm.num_unfinished < 3 and time.monotonic() < until:
                await asyncio.sleep(0.001)
            sleep = asyncio.ensure_future(llm.sleep(1, mode))
            await asyncio.sleep(0)
            assert llm.is_sleeping
            with pytest.raises(EngineAsleepError):
                await run()
            assert (await sleep).level == 1
            ends = await asyncio.gather(*runs, return_exceptions=True)
            if mode == "wait":
                assert [len(end) for end in ends if isinstance(end, list)] == [200] * 3
            else:
                assert all(
                    isinstance(end, RequestAbortedError) and "put to sleep" in str(end) for end in ends
                )
            with pytest.raises(RequestError, match="sleeps already"):
                await llm.sleep()
            await llm.wake_up()
            assert (await run())[:24] == tiny.greedy("llama", 0)[:24]
            with pytest.raises(RequestError, match="mode='keep'"):
                await llm.sleep(1, "keep")
            with pytest.raises(RequestError, match="level=7"):
                await llm.sleep(7)
            assert not llm.is_sleeping and await run()

    asyncio.run(main())
