"""An engine that hangs is noticed, ended and replaced; one that is slow, idle or new to its work is not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from octavo.async_llm import AsyncLLM
from octavo.engine.client import ProcessClient
from octavo.engine.pulse import LoopPulse
from octavo.engine.watchdog import Watch, Watchdog
from octavo.errors import EngineDeadError, EngineRestartingError
from octavo.messages import Pulse
from tests import tiny
from tests.engine.hanging_core import POISON, SLOW, SLOW_SECONDS
from tests.engine.test_async_llm import settings
from tests.engine.test_engine_faults import LONG, started, tokens

TIMEOUT = 0.6


class Hanging(AsyncLLM):
    """Steps with the token `POISON` never return."""

    how = "sleep"

    def _start_engine(self) -> ProcessClient:
        command = ("tests.engine.hanging_core", self.how)
        return ProcessClient(
            self._processor.config, self._on_outputs, self._on_death, self._abandoned, command, self._watch
        )


def run(test, cls: type[AsyncLLM] = AsyncLLM, **options) -> None:
    async def main() -> None:
        engine = await cls.create(settings(), **{"engine_timeout": TIMEOUT, **options})
        try:
            await asyncio.wait_for(test(engine), 100)
        finally:
            await engine.shutdown()

    asyncio.run(main())


async def answer(engine: AsyncLLM, prompt: list[int], max_tokens: int = 4) -> list[int]:
    told: list[int] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, LONG.clone(max_tokens=max_tokens)):
        told += output.outputs[0].token_ids
    return told


async def warm(engine: AsyncLLM) -> None:
    """Steps of the sizes to come have run: a first one would get longer."""
    for _ in range(2):
        assert len(await answer(engine, [5] * 4)) == 4


def test_a_stopped_process_is_noticed_and_blocks_nobody():
    async def test(engine: AsyncLLM) -> None:
        await tokens(engine, 0)
        stream = await started(engine, 0)
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGSTOP)
        begin = time.monotonic()
        # More than a socket's buffer holds: sending it must not stop the loop.
        others = [asyncio.create_task(answer(engine, [300] * 200)) for _ in range(500)]
        await asyncio.sleep(0)
        assert engine._client._sender._left and engine._dead is None and engine.num_unfinished >= 500
        ends = await asyncio.gather(stream, *others, return_exceptions=True)
        assert {type(end) for end in ends[1:]} == {EngineDeadError}, ends[:3]
        assert 2 < time.monotonic() - begin < 90
        with pytest.raises(EngineDeadError, match="it hung: it has given no sign of life for"):
            await engine.check_health()

    run(test, engine_timeout=3)


@pytest.mark.parametrize("how", ["sleep", pytest.param("spin", marks=pytest.mark.slow)])
def test_a_step_that_never_returns_is_ended_and_the_engine_replaced(how, monkeypatch):
    monkeypatch.setattr(Hanging, "how", how)

    async def test(engine: AsyncLLM) -> None:
        await warm(engine)
        before, counted = engine.engine_pid, engine.stats()
        hung = asyncio.create_task(answer(engine, [5, 5, 5, POISON]))
        with pytest.raises(EngineDeadError, match="engine core has ended"):  # run again once, in vain
            await hung
        while isinstance(engine._dead, EngineRestartingError):
            await asyncio.sleep(0.01)
        assert engine.engine_pid != before
        assert await answer(engine, tiny.PROMPTS[0], 20) == tiny.greedy("llama", 0)[:20]
        now = engine.stats()
        assert now.generation_tokens >= counted.generation_tokens + 20
        assert now.iteration_tokens.total > counted.iteration_tokens.total > 0
        assert now.num_running == 0

    run(test, Hanging, restart_engine=True)


def test_slow_first_steps_idle_engines_and_stopped_idle_ones_are_left_alone():
    async def test(engine: AsyncLLM) -> None:
        assert SLOW_SECONDS > 3 * TIMEOUT
        pid = engine.engine_pid
        assert pid is not None
        assert len(await answer(engine, [SLOW] * 100)) == 4
        await asyncio.sleep(3 * TIMEOUT)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(3 * TIMEOUT)
        os.kill(pid, signal.SIGCONT)
        assert len(await answer(engine, [5] * 4)) == 4
        assert engine.engine_pid == pid

    run(test, Hanging)


class Watched:
    """A watchdog whose core answers what `pulses` make; ends are noted."""

    def __init__(self, pulse, awaited: bool = True, seconds: float = 0.2):
        self.hung: list[str] = []
        self.pulse = pulse
        self.ended = threading.Event()
        self.dog = Watchdog(Watch(seconds, lambda: awaited), self.ask, self.note)

    def ask(self) -> None:
        if (told := self.pulse()) is not None:
            self.dog.tell(told)

    def note(self, what: str) -> None:
        self.hung.append(what)
        self.ended.set()

    def hangs_within(self, seconds: float) -> bool:
        found = self.ended.wait(seconds)
        self.dog.close()
        return found


def test_what_counts_as_hung():
    turns = iter(range(10**9))
    assert not Watched(lambda: Pulse(next(turns), idle=False)).hangs_within(1.0)
    assert not Watched(lambda: Pulse(7, idle=True)).hangs_within(1.0)
    assert not Watched(lambda: None, awaited=False).hangs_within(1.0)
    assert not Watched(lambda: Pulse(7, idle=False, first=True)).hangs_within(1.0)  # of 2
    assert not Watched(lambda: Pulse(7, idle=False, longest=0.2)).hangs_within(1.0)  # of 2.2
    silent = Watched(lambda: None)
    assert silent.hangs_within(20) and "no sign of life" in silent.hung[0]
    still = Watched(lambda: Pulse(7, idle=False))
    assert still.hangs_within(20) and "in one step for" in still.hung[0]
    assert Watched(lambda: Pulse(7, idle=False, first=True), seconds=0.1).hangs_within(30)


def test_the_pulse_of_a_loop():
    loop = LoopPulse()
    assert loop.pulse() == Pulse(0, idle=True)
    loop.go_round()
    loop.launch((1, "a"))
    assert loop.pulse() == Pulse(1, idle=False, first=True)
    loop.finish((1, "a"), 9.5)
    assert loop.pulse() == Pulse(1, idle=False, longest=9.5)  # until another tells what is usual
    for seconds in (0.25, 0.5, 0.25):
        loop.finish((1, "a"), seconds)
    assert loop.pulse() == Pulse(1, idle=False, longest=0.5)
    loop.launch((1, "a"))
    loop.launch((2, "a"))  # beside the one before
    assert loop.pulse().first
    loop.finish((2, "a"), 2.0)
    assert loop.pulse() == Pulse(1, idle=False, longest=2.0)
    loop.chore()
    assert loop.pulse().first
    loop.go_round()
    assert not loop.pulse().first
    loop.rest()
    assert loop.pulse() == Pulse(2, idle=True, longest=2.0)
