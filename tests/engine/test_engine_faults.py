"""An engine process that is killed, once and again; texts that cannot be made; readers that do not read."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from octavo import LLM
from octavo.async_llm import AsyncLLM
from octavo.engine import mailbox, restarts
from octavo.engine.mailbox import Mailbox
from octavo.errors import EngineDeadError, EngineRestartingError, RequestFailedError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests import tiny
from tests.engine.test_async_llm import settings

LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def run(test, **options) -> None:
    async def main() -> None:
        config = settings()
        config.max_num_seqs = 3
        engine = await AsyncLLM.create(config, **options)
        try:
            await asyncio.wait_for(test(engine), 100)
        finally:
            await engine.shutdown()

    asyncio.run(main())


def kill(engine: AsyncLLM) -> None:
    assert engine.engine_pid is not None
    os.kill(engine.engine_pid, signal.SIGKILL)


async def tokens(engine: AsyncLLM, prompt: int, params: SamplingParams = LONG, began=None) -> list[int]:
    told: list[int] = []
    async for output in engine.generate({"prompt_token_ids": tiny.PROMPTS[prompt]}, params):
        told += output.outputs[0].token_ids
        if began is not None:
            began.set()
    return told


async def started(engine: AsyncLLM, prompt: int) -> asyncio.Task[list[int]]:
    """A stream that has brought tokens."""
    began = asyncio.Event()
    task = asyncio.create_task(tokens(engine, prompt, began=began))
    waiting = asyncio.create_task(began.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    return task


def test_a_killed_engine_ends_all_streams_with_an_error():
    async def test(engine: AsyncLLM) -> None:
        tasks = [await started(engine, i) for i in range(3)]
        tasks += [asyncio.create_task(tokens(engine, 0)) for _ in range(4)]  # queued
        await asyncio.sleep(0)
        kill(engine)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineDeadError}, ends
        with pytest.raises(EngineDeadError, match="exit code -9"):
            await engine.check_health()

    run(test)


def test_a_restarted_engine_runs_what_was_queued():
    async def test(engine: AsyncLLM) -> None:
        tasks = [await started(engine, i) for i in range(3)]
        queued = [asyncio.create_task(tokens(engine, i % 3)) for i in range(5)]
        await asyncio.sleep(0)
        before = engine.engine_pid
        kill(engine)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineRestartingError}, ends
        with pytest.raises(EngineRestartingError):
            await engine.check_health()
        with pytest.raises(EngineRestartingError):
            await tokens(engine, 0)
        for i, told in enumerate(await asyncio.gather(*queued)):
            assert told[:48] == tiny.greedy("llama", i % 3)[:48] and len(told) == 150
        await engine.check_health()
        assert engine.engine_pid != before and engine.num_unfinished == 0

    run(test, restart_engine=True)


def test_questions_to_a_restarted_engine_get_its_own_answers():
    """The death was told to all questions; none of those words may stand for an answer later."""

    async def test(engine: AsyncLLM) -> None:
        kill(engine)
        while engine._dead is None:
            await asyncio.sleep(0.001)
        while isinstance(engine._dead, EngineRestartingError):
            await asyncio.sleep(0.001)
        assert (await engine.describe_kv(8)).num_blocks > 0
        assert (await engine.sleep(1)).level == 1
        assert (await engine.wake_up()).level == 0
        stream = await started(engine, 0)
        assert len((await engine.describe_kv(8, 4)).requests) == 1
        await stream

    run(test, restart_engine=True)


def test_a_request_is_run_again_once_and_restarts_come_to_an_end(monkeypatch):
    monkeypatch.setattr(restarts, "MOST_RESTARTS", 2)

    async def restarted(engine: AsyncLLM) -> None:
        while engine._dead is None:
            await asyncio.sleep(0.001)
        while isinstance(engine._dead, EngineRestartingError):
            await asyncio.sleep(0.001)

    async def test(engine: AsyncLLM) -> None:
        whole = LONG.clone(max_tokens=200, output_kind=RequestOutputKind.FINAL_ONLY)
        silent = asyncio.create_task(tokens(engine, 1, whole))
        seen = await started(engine, 0)
        kill(engine)
        with pytest.raises(EngineRestartingError):
            await seen
        await restarted(engine)
        assert not silent.done()
        kill(engine)
        with pytest.raises(EngineRestartingError):
            await silent
        await restarted(engine)
        await engine.check_health()
        kill(engine)
        await restarted(engine)
        with pytest.raises(EngineDeadError, match="exit code -9") as end:
            await tokens(engine, 0)
        assert not isinstance(end.value, EngineRestartingError)

    run(test, restart_engine=True)


def test_shutdown_while_the_engine_is_started_again():
    async def test(engine: AsyncLLM) -> None:
        queued = asyncio.create_task(tokens(engine, 0, LONG.clone(output_kind=RequestOutputKind.FINAL_ONLY)))
        await asyncio.sleep(0.01)
        kill(engine)
        while engine._restarter is None:
            await asyncio.sleep(0.01)
        await engine.shutdown()
        with pytest.raises(RequestFailedError):
            await queued
        assert not engine._restarter.is_alive()

    run(test, restart_engine=True)


def test_a_tokenizer_that_fails_ends_its_request_alone(monkeypatch):
    from octavo.tokenization.stop import TextStream

    right = TextStream.push

    def push(self, token_ids, *args, **kwargs):
        if self.broken and len(self.text) > 5:
            raise ZeroDivisionError("injected")
        return right(self, token_ids, *args, **kwargs)

    async def test(engine: AsyncLLM) -> None:
        others = [await started(engine, i) for i in (0, 2)]
        monkeypatch.setattr(TextStream, "broken", True, raising=False)
        with pytest.raises(RequestFailedError, match="ZeroDivisionError: injected"):
            await tokens(engine, 1, LONG.clone(n=2))
        for task, i in zip(others, (0, 2), strict=True):
            assert (await task)[:48] == tiny.greedy("llama", i)[:48]
        monkeypatch.setattr(TextStream, "broken", False, raising=False)
        assert (await tokens(engine, 1))[:48] == tiny.greedy("llama", 1)[:48]
        assert engine.num_unfinished == 0

    init = TextStream.__init__

    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.broken = TextStream.broken

    monkeypatch.setattr(TextStream, "broken", False, raising=False)
    monkeypatch.setattr(TextStream, "__init__", made)
    monkeypatch.setattr(TextStream, "push", push)
    run(test)


def test_a_stream_that_is_not_read_stays_small_and_whole():
    async def test(engine: AsyncLLM) -> None:
        params = LONG.clone(n=3, logprobs=2, max_tokens=200)
        stream = engine.generate({"prompt_token_ids": tiny.PROMPTS[0]}, params, "slow")
        want = [[t] for t in tiny.greedy("llama", 0)]
        told: list[list[int]] = [[], [], []]
        positions, texts, outputs = [0, 0, 0], ["", "", ""], 0
        async with aclosing(stream):
            async for output in stream:
                if not outputs:
                    while engine.stats().num_running:
                        assert len(engine._queues["slow"]) <= mailbox.MOST
                        await asyncio.sleep(0.01)
                outputs += 1
                for choice in output.outputs:
                    told[choice.index] += choice.token_ids
                    positions[choice.index] += len(choice.logprobs)
                    texts[choice.index] += choice.text
        assert outputs <= mailbox.MOST + 1
        assert told[0] == told[1] == told[2] and len(told[0]) == 200 == positions[0] == positions[2]
        assert [[t] for t in told[0][:48]] == want[:48]
        assert engine.tokenizer is not None
        assert texts[0] == texts[1] == engine.tokenizer.decode(told[0])

    run(test)


@pytest.mark.parametrize("merges", [False, True])
def test_mailboxes(merges):
    async def main() -> None:
        box: Mailbox[RequestOutput | Exception] = Mailbox(merges)
        for i in range(1000):
            logprobs = [{i: Logprob(-1.0)}]
            choice = CompletionOutput(i % 2, f"{i},", [i], -float(i), logprobs, "length" if i > 997 else None)
            marked = {"synthetic_acceptance": [0.5]}
            box.put(RequestOutput("r", None, [1], [choice], i == 999, **marked))
            assert len(box) <= mailbox.MOST
        box.put(ValueError("the end"))
        items = [await box.get() for _ in range(len(box))]
        assert isinstance(items.pop(), ValueError)
        outputs = [item for item in items if isinstance(item, RequestOutput)]
        assert outputs[-1].finished
        assert all(output.synthetic_acceptance == [0.5] for output in outputs)
        told: dict[int, list[int]] = {0: [], 1: []}
        for output in outputs:
            for choice in output.outputs:
                told[choice.index] += choice.token_ids
                assert [next(iter(p)) for p in choice.logprobs or []] == choice.token_ids
                assert choice.text == "".join(f"{t}," for t in choice.token_ids)
        if merges:
            assert told == {0: list(range(0, 1000, 2)), 1: list(range(1, 1000, 2))}
        reader = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(ValueError("late"))
        assert str(await reader) == "late"

    asyncio.run(main())


def test_libraries_that_cannot_be_loaded_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr("octavo.engine.client.settle_libraries", broken)
    with pytest.raises(ImportError, match=r"libtorch\.so"):
        LLM(str(tiny.checkpoint("llama")), device="cpu")
