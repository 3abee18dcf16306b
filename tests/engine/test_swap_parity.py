"""Greedy tokens with the host tier are those without it: preemption at every step, and returning prefixes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_maker import ScheduledStep
from octavo.kv.groups import page_bytes
from octavo.worker import worker
from tests import tiny

GIB = 1 << 30
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPTS = [tiny.PROMPTS[1][:37], tiny.PROMPTS[0][:21]]


def make(variant: str, slots: int, blocks: int = 0, **settings) -> LLM:
    values = dict(
        device="cpu", num_threads=1, dtype="float32", max_model_len=tiny.CONTEXT, max_num_seqs=4,
        max_num_batched_tokens=16, block_size=8, skip_tokenizer_init=True, check_invariants=True,
        kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    with LLM(str(tiny.checkpoint(variant)), **(values | settings)) as llm:
        page = page_bytes(llm.facts.groups)
        groups = len(llm.facts.groups)
    memory = dict(kv_cache_memory_bytes=(blocks or 12 * groups) * page, swap_space=slots * page / GIB)
    return LLM(str(tiny.checkpoint(variant)), **(values | settings | memory))


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def before_each_step(monkeypatch) -> list[Callable[[Scheduler], None]]:
    """What is to be done to the scheduler before each step; copying is worth it, whatever the rates here."""
    actions: list[Callable[[Scheduler], None]] = []
    schedule = Scheduler.schedule

    def patched(self: Scheduler) -> ScheduledStep | None:
        for action in actions:
            action(self)
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", patched)
    monkeypatch.setattr(worker, "prefill_rate", lambda *_: 1e-3)
    return actions


@pytest.mark.parametrize("variant, overlap", [("llama", False), ("llama", True), ("gemma3", True)])
def test_preemption_at_every_step(variant, overlap, before_each_step):
    count = at = 0
    taken: list[int] = []

    def preempt(scheduler: Scheduler) -> None:
        """All who run leave, and what they leave is another's for a step."""
        nonlocal count
        pool = scheduler.kv.pool
        pool.release(taken)
        taken.clear()
        if count == at:
            for slot in scheduler._slots.running.tolist():
                scheduler._preempt(scheduler._slots.at(slot))
            taken.extend(pool.allocate(pool.num_free))
        count += 1

    with make(variant, 0, async_scheduling=overlap) as llm:
        want = generate(llm)
        assert llm.stats().num_preemptions == 0
    before_each_step.append(preempt)
    # A block that a test holds is in no table.
    with make(variant, 100, async_scheduling=overlap, check_invariants=False) as llm:
        while at <= count:  # once it is beyond the last step, nothing was preempted
            llm.reset_prefix_cache()
            count = 0
            assert generate(llm) == want
            at += 1
        stats = llm.stats()
    assert at > 8
    assert stats.resumed_by_copy > 5 and stats.host_blocks_in > 20
    assert stats.host_loads_failed == 0 and stats.kv_blocks_used == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_working_set_beyond_the_device(caching, before_each_step):
    """More requests at once than fit, and prompts that come back when the device has forgotten them."""
    prompts = [[3 + (i * j) % 200 for j in range(1, 50)] for i in range(1, 7)]
    settings = dict(enable_prefix_caching=caching, look_ahead_admission=False)
    with make("llama", 0, blocks=100, **settings) as llm:
        want = generate(llm, prompts)
    with make("llama", 100, blocks=13, **settings) as llm:
        for _ in range(2):
            assert generate(llm, prompts) == want
        stats = llm.stats()
    assert (stats.host_cache_hits > 0) == caching
    assert stats.num_preemptions == 0 or stats.resumed_by_copy > 0
