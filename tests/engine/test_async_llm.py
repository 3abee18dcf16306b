"""The asynchronous face over a real engine process: names that come again, news that cannot be read."""

from __future__ import annotations

import asyncio
import subprocess
import time
from contextlib import aclosing

import pytest

from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests import tiny

LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
SHORT = LONG.clone(max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)
PROMPT = [5, 6, 7]


def settings() -> EngineConfig:
    return EngineConfig(
        model=str(tiny.checkpoint("llama")),
        dtype="float32",
        device="cpu",
        num_threads=1,
        kv_cache_memory_bytes=8 << 20,
        check_invariants=True,
    )


def run(test) -> None:
    """Run a coroutine function over one engine."""

    async def main() -> None:
        engine = await AsyncLLM.create(settings())
        try:
            await asyncio.wait_for(test(engine), 60)
        finally:
            await engine.shutdown()

    asyncio.run(main())


async def answer(engine: AsyncLLM, name: str, params: SamplingParams = SHORT) -> list[list[int]]:
    async for output in engine.generate(PROMPT, params, name):
        if output.finished:
            assert {choice.finish_reason for choice in output.outputs} == {"length"}
            return [choice.token_ids for choice in output.outputs]
    raise AssertionError("the request never finished")


def test_names_may_come_again_and_resemble_those_of_choices(monkeypatch):
    async def test(engine: AsyncLLM) -> None:
        expected = await answer(engine, "alone")
        for _ in range(5):
            async with aclosing(engine.generate(PROMPT, LONG, "again")) as stream:
                await anext(stream)
            # At once: the core has not yet seen that the first one was given up.
            assert await answer(engine, "again") == expected
        async with aclosing(engine.generate(PROMPT, LONG.clone(stop="\n"), "again")):
            pass
        for huge in (1 << 63, 1 << 64, 10**30):
            assert await answer(engine, "again", SHORT.clone(top_k=huge, n=1)) == expected
        with monkeypatch.context() as patch:
            patch.setattr(engine._client, "_encoder", None)
            with pytest.raises(AttributeError):
                await answer(engine, "again")
        assert engine.num_unfinished == 0
        victim = asyncio.create_task(answer(engine, "x#0", SHORT.clone(max_tokens=40)))
        await asyncio.sleep(0.05)
        assert await answer(engine, "x", SHORT.clone(n=2)) == expected * 2
        assert [tokens[:12] for tokens in await victim] == expected
        assert await answer(engine, "alone") == expected  # all earlier aborts have arrived
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)

    run(test)


def test_news_that_cannot_be_taken_in_end_the_engine_and_not_in_silence(monkeypatch):
    async def test(engine: AsyncLLM) -> None:
        def broken(outputs):
            raise ZeroDivisionError("injected")

        monkeypatch.setattr(engine._outputs, "process", broken)
        with pytest.raises(EngineDeadError, match="injected"):
            await answer(engine, "any")
        with pytest.raises(EngineDeadError):
            await engine.check_health()

    run(test)


def test_a_start_that_is_given_up_ends_the_loading_process(monkeypatch):
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recorded(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", recorded)

    async def cancelled() -> None:
        task = asyncio.create_task(AsyncLLM.create(settings()))
        while not started:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    begin = time.monotonic()
    asyncio.run(cancelled())
    while started[0].poll() is None and time.monotonic() - begin < 60:
        time.sleep(0.01)
    assert started[0].poll() is not None
    assert time.monotonic() - begin < 60


def test_settings_as_keywords_and_a_block_that_frees():
    async def main() -> None:
        with pytest.raises(ConfigError, match="did you mean block_size"):
            await AsyncLLM.create(str(tiny.checkpoint("llama")), blocksize=8)
        with pytest.raises(ConfigError, match="block_size is given beside an EngineConfig"):
            await AsyncLLM.create(EngineConfig(), block_size=8)
        settings = dict(dtype="float32", device="cpu", num_threads=1, kv_cache_memory_bytes=8 << 20)
        async with await AsyncLLM.create(str(tiny.checkpoint("llama")), **settings) as engine:
            assert [len(ids) for ids in await answer(engine, "one", SHORT.clone(n=1))] == [12]
        with pytest.raises(EngineDeadError, match="shut down"):
            await answer(engine, "late")

    asyncio.run(main())


def test_an_engine_made_before_its_loop_as_vllms_users_do():
    from dataclasses import asdict

    from octavo import AsyncEngineArgs, AsyncLLMEngine

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**asdict(settings())))

    async def main() -> tuple[list[list[int]], list[list[int]]]:
        try:
            prompt = {"prompt_token_ids": [7, 7, *PROMPT]}
            params = SHORT.clone(truncate_prompt_tokens=3)
            stream = engine.generate(prompt=prompt, sampling_params=params, request_id="a")
            [cut] = [output async for output in stream]
            assert cut.prompt_token_ids == PROMPT
            return [c.token_ids for c in cut.outputs], await answer(engine, "b")
        finally:
            await engine.shutdown()

    cut, short = asyncio.run(main())
    assert cut == short


def test_log_probabilities_are_taken_in_a_choice_at_a_time() -> None:
    """The lock that the event loop waits for is free between them."""
    from octavo.async_llm import _shares
    from octavo.messages import CoreOutput
    from octavo.step_messages import TokenLogprobs

    plain = [CoreOutput("a", [1]), CoreOutput("b", [2])]
    assert _shares(plain) == [plain] and _shares([]) == [[]]
    told = [*plain, CoreOutput("c", [3], logprobs=[TokenLogprobs([3], [-1.0], 1)])]
    assert _shares(told) == [[output] for output in told]
