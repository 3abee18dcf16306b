"""Ranks that die, stop, hang or disagree: requests end with an error in seconds, and no process is left."""

from __future__ import annotations

import asyncio
import threading
import time

import psutil
import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.engine import rank_processes
from octavo.errors import EngineDeadError, EngineRestartingError, RequestFailedError
from tests import tiny
from tests.engine.test_engine_faults import started, tokens
from tests.engine.test_llm_parity import GREEDY, expected, generate, make
from tests.parallel import faulty_rank
from tests.parallel.test_ranks import await_end, ranks_of
from tests.server.running import running

ENDLESS = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, detokenize=False)


def fails_soon(llm: LLM, words: str, seconds: float) -> None:
    """A request ends with this error in time."""
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=words):
        llm.generate([tiny.PROMPTS[2]] * 8, ENDLESS, use_tqdm=False)
    assert time.monotonic() - begin < seconds


def test_a_stopped_rank_is_given_up_within_seconds():
    with make("llama", tensor_parallel_size=2, distributed_heartbeat_seconds=3) as llm:
        ranks = ranks_of()
        threading.Timer(0.3, ranks[1].suspend).start()
        fails_soon(llm, rf"rank \d \(pid {ranks[1].pid}\) gives no sign of life", 10)
        await_end(ranks)


def test_a_rank_that_was_killed_while_nothing_ran_is_known_at_once():
    async def main() -> None:
        engine = await AsyncLLM.create(
            model=str(tiny.checkpoint("llama")), dtype="float32", device="cpu", max_model_len=tiny.CONTEXT,
            kv_cache_memory_bytes=4 << 20, tensor_parallel_size=2, num_threads=1,
        )  # fmt: skip
        try:
            ranks = ranks_of(engine.engine_pid)
            assert len(ranks) == 2
            await engine.check_health()
            ranks[0].kill()
            with pytest.raises(EngineDeadError, match="was ended by SIGKILL"):
                while True:
                    await asyncio.sleep(0.05)
                    await engine.check_health()
            await_end(ranks)
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_whose_rank_died_is_restarted_and_serves_what_was_queued():
    async def main() -> None:
        engine = await AsyncLLM.create(
            model=str(tiny.checkpoint("llama")), dtype="float32", device="cpu", max_model_len=tiny.CONTEXT,
            kv_cache_memory_bytes=4 << 20, tensor_parallel_size=2, num_threads=1, max_num_seqs=2,
            skip_tokenizer_init=True, restart_engine=True,
        )  # fmt: skip
        try:
            ranks = ranks_of(engine.engine_pid)
            streams = [await started(engine, i) for i in range(2)]
            queued = [asyncio.create_task(tokens(engine, i % 3)) for i in range(4)]
            await asyncio.sleep(0)
            ranks[1].kill()
            ends = await asyncio.gather(*streams, return_exceptions=True)
            assert {type(end) for end in ends} == {EngineRestartingError}, ends
            for i, told in enumerate(await asyncio.gather(*queued)):
                assert told[:48] == tiny.greedy("llama", i % 3)[:48] and len(told) == 150
            await engine.check_health()
            await_end(ranks)
            ranks = ranks_of(engine.engine_pid)
            assert len(ranks) == 2
        finally:
            await engine.shutdown()
        await_end(ranks)

    asyncio.run(asyncio.wait_for(main(), 90))


@pytest.mark.parametrize("victim", ["engine", "server"])
@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_end_with_the_process_above_them(victim, stopped):
    with running(str(tiny.checkpoint("llama")), "--tensor-parallel-size", "2") as (child, _, client):
        engine = psutil.Process(child.pid).children()
        ranks = ranks_of(child.pid)
        assert len(engine) == 1 and len(ranks) == 2
        if stopped:
            ranks[1].suspend()
        if victim == "server":
            child.kill()
        else:
            engine[0].kill()
        await_end([*engine, *ranks])
        if victim == "engine":
            end = time.monotonic() + 5
            while (answer := client.get("/health")).status_code == 200 and time.monotonic() < end:
                time.sleep(0.05)
            assert answer.status_code == 503


@pytest.fixture
def faulty(monkeypatch):
    """Engines of this test have ranks that fail at certain tokens."""
    monkeypatch.setattr(rank_processes, "_MODULE", faulty_rank.__name__)


def with_token(token: int) -> list[int]:
    return [*tiny.PROMPTS[0], token]


def test_what_all_ranks_fail_alike_is_one_requests_failure(faulty):
    with make("llama", tensor_parallel_size=2) as llm:
        for request in (with_token(faulty_rank.FAILS_EVERYWHERE), tiny.PROMPTS[0]):
            outcome = None
            try:
                outcome = llm.generate([request, *tiny.PROMPTS], GREEDY, use_tqdm=False)
            except RequestFailedError as error:
                assert "ValueError: this token cannot be computed" in str(error)
            assert (outcome is None) == (request != tiny.PROMPTS[0])
        assert generate(llm) == expected("llama")


def test_what_one_rank_fails_alone_ends_the_engine(faulty, monkeypatch):
    monkeypatch.setattr(rank_processes, "STRAGGLER_SECONDS", 1.0)
    with make("llama", tensor_parallel_size=2) as llm:
        ranks = ranks_of()
        words = r"rank 1.*ValueError: this token cannot be computed here"
        with pytest.raises(EngineDeadError, match=words):
            llm.generate([with_token(faulty_rank.FAILS_ON_ONE)], GREEDY, use_tqdm=False)
        await_end(ranks)


def test_a_rank_that_hangs_ends_the_engine(faulty):
    with make("llama", tensor_parallel_size=2, distributed_timeout_seconds=3) as llm:
        ranks = ranks_of()
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank"):
            llm.generate([with_token(faulty_rank.HANGS_ON_ONE)], GREEDY, use_tqdm=False)
        assert time.monotonic() - begin < 10
        await_end(ranks)


def test_a_stage_that_fails_a_step_need_not_wait_for_slow_ones(faulty, monkeypatch):
    monkeypatch.setattr(rank_processes, "STRAGGLER_SECONDS", 1.0)
    with make("llama", pipeline_parallel_size=2) as llm:
        with pytest.raises(RequestFailedError, match="ValueError: this prompt cannot be computed"):
            llm.generate([[faulty_rank.FIRST_STAGE_FAILS, *tiny.PROMPTS[0]]], GREEDY, use_tqdm=False)
        assert generate(llm) == expected("llama")


def test_ranks_may_be_silent_in_what_is_no_step(faulty):
    with make("llama", tensor_parallel_size=2, distributed_heartbeat_seconds=3) as llm:
        llm.sleep(1)
        llm.wake_up()
        assert generate(llm) == expected("llama")


def test_two_engines_at_once():
    with make("llama", tensor_parallel_size=2) as one, make("qwen3", tensor_parallel_size=2) as other:
        told: dict[str, list[list[int]]] = {}
        threads = [
            threading.Thread(target=lambda llm=llm, name=name: told.__setitem__(name, generate(llm)))
            for llm, name in ((one, "llama"), (other, "qwen3"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told == {name: expected(name) for name in ("llama", "qwen3")}
