"""Admission where drafts make requests grow by different numbers of tokens: as few are preempted as without.

The scheduler alone, with counts of tokens that stand by chance, as a model's verdicts would be.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo.engine.limits import SchedulerLimits
from octavo.engine.pace import Pace
from octavo.engine.scheduler import Scheduler
from octavo.engine.tables import drop_drafts
from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.manager import KVManager
from octavo.messages import CoreRequest
from octavo.sampling_params import SamplingParams
from octavo.speculative.proposer import HostProposer, Proposal
from octavo.step_messages import StepPlan, StepResult

SIZE, MOST = 16, 3
WORD, STOP = 5, 7


class Always(HostProposer):
    """Drafts as many tokens as may be."""

    def propose(self, slot: int, tokens: np.ndarray, most: int) -> Proposal:
        return Proposal(np.full(most, WORD, np.int32), 0)


class Load(NamedTuple):
    """Requests: tokens of each one's prompt, of its output, and of that at most, and how likely its drafts
    are to stand, each if those before it do."""

    texts: list[tuple[int, int, int, tuple[float, ...]]]
    num_blocks: int
    ends_early: bool = False


def alike(fits: int, draw: random.Random) -> Load:
    """Requests that differ in nothing, of whole blocks, all at once."""
    del draw
    return Load([(64, 80, 80, (0.8, 0.7, 0.65))] * 16, fits * 9)


def mixed(fits: int, draw: random.Random) -> Load:
    """Texts of all lengths; of half of them nearly all drafts stand, of the others hardly any."""
    texts = []
    for _ in range(40):
        length = draw.randint(40, 200)
        rates = (0.95, 0.95, 0.95) if draw.random() < 0.5 else (0.1, 0.1, 0.1)
        texts.append((draw.randint(20, 150), length, length, rates))
    return Load(texts, fits * 14)


def early(fits: int, draw: random.Random) -> Load:
    """The same, whose ends nobody knows."""
    load = mixed(fits, draw)
    texts = [(prompt, output, 220, rates) for prompt, output, _, rates in load.texts]
    return Load(texts, load.num_blocks, ends_early=True)


def run(load: Load, drafts: int, seed: int, ahead: bool = False) -> tuple[int, int]:
    """Preemptions, and steps.

    Args:
        ahead: whether a step is planned before the one before it is taken in, where that can be.
    """
    draw = random.Random(seed)
    group = KVGroup("full", (0,), KVFormat("bfloat16", SIZE, 1, 64))
    limits = SchedulerLimits(
        64, 2048, 1024, 100, num_speculative_tokens=drafts, adaptive_drafts=False, find_shared_prefix=False
    )
    scheduler = Scheduler(limits, KVManager([group], load.num_blocks, None), Always() if drafts else None)
    for i, (prompt, _, limit, _) in enumerate(load.texts):
        params = SamplingParams(temperature=0.0, max_tokens=limit, detokenize=False)
        eos = [STOP] if load.ends_early else []
        scheduler.add(CoreRequest(request_id=str(i), prompt_token_ids=[WORD] * prompt, params=params, seed=0,
                                  eos_token_ids=eos, stream=False))  # fmt: skip
    steps, tokens = 0, 0
    while scheduler.has_requests:
        step = scheduler.schedule()
        assert step is not None, "nothing runs, and requests wait"
        steps += 1
        outputs = scheduler.update(step, _verdict(scheduler, step.plan, load, draw))
        tokens += sum(len(output.new_token_ids) for output in outputs)
    scheduler.check()
    assert tokens == sum(output for _, output, _, _ in load.texts)
    return scheduler.stats.num_preemptions, steps


def _verdict(scheduler: Scheduler, plan: StepPlan, load: Load, draw: random.Random) -> StepResult:
    drafts = np.zeros(len(plan.slots), np.int32) if plan.num_drafts is None else plan.num_drafts
    tokens = np.full((len(plan.slots), 1 + int(drafts.max(initial=0))), WORD, np.int32)
    counts = plan.samples.astype(np.int32)
    for i, slot in enumerate(plan.slots.tolist()):
        prompt, output, _, rates = load.texts[int(scheduler._slots.at(slot).core.request_id)]
        for rate in rates[: int(drafts[i])]:
            if draw.random() >= rate:
                break
            counts[i] += 1
        last = prompt + output - int(plan.start[i] + plan.num_rows[i] - drafts[i]) - 1
        if 0 <= last < tokens.shape[1]:
            tokens[i, last] = STOP
    return StepResult(tokens, counts)


@pytest.mark.parametrize(
    ("load", "fits", "seeds", "more"),
    [
        (alike, 2, 6, 2),
        (alike, 3, 6, 3),
        (alike, 4, 6, 2),
        (mixed, 4, 2, 3),
        (mixed, 8, 3, 4),
        (early, 8, 3, 4),
    ],
)
def test_drafts_preempt_hardly_more_than_plain_decoding(load, fits: int, seeds: int, more: int):
    """Over several loads, since who is preempted in one of them is chance."""
    counts, steps = [0, 0], [0, 0]
    for seed in range(seeds):
        made = load(fits, random.Random(seed))
        for column, drafts in enumerate((0, MOST)):
            preempted, took = run(made, drafts, seed)
            counts[column] += preempted
            steps[column] += took
    print(f"preemptions {counts[0]} -> {counts[1]}, steps {steps[0]} -> {steps[1]}")
    assert counts[1] <= counts[0] + more
    assert steps[1] < 0.85 * steps[0]


@pytest.mark.parametrize(("num_free", "left"), [(0, [4, 1, 2, 1]), (1, [4, 4, 4, 1])])
def test_drafts_that_need_no_block_are_judged_where_blocks_are_short(num_free: int, left: list[int]):
    computed, capacity = np.array([60, 31, 94, 15]), np.array([64, 32, 96, 16])
    slots: Any = SimpleNamespace(
        num_computed=computed, capacity=capacity, num_drafts=np.array([3, 3, 3, 0], np.int32)
    )
    kv: Any = SimpleNamespace(block_size=SIZE, groups=[0], pool=SimpleNamespace(num_free=2 * num_free))
    rows = np.array([4, 4, 4, 1], np.int32)
    drop_drafts(slots, kv, np.arange(4), rows)
    assert rows.tolist() == left
    assert slots.num_drafts.tolist() == [rows - 1 for rows in left]


def test_the_pace_of_requests_and_of_those_to_come():
    pace = Pace(3)
    assert pace.of(np.array([0, 2]))[0].tolist() == [1, 1] and pace.usual(2)[1].tolist() == [0, 0]
    draw = np.random.default_rng(0)
    means = np.zeros(3)
    for _ in range(2000):
        counts = np.array([1, 4, draw.choice([1, 3])])
        pace.passed(np.arange(3), counts)
        means += pace.of(np.arange(3))[0] / 2000
    mean, variance = pace.of(np.arange(2))
    assert mean == pytest.approx([1, 4], abs=1e-6) and variance == pytest.approx([0, 0], abs=1e-6)
    assert means[2] == pytest.approx(2, abs=0.1)
    pace.enter(0)
    usual, spread = pace.usual(1)
    assert pace.of(np.array([0]))[0] == usual == pytest.approx(7 / 3, abs=0.3)
    # Of all steps a third yields 4 tokens, a sixth 3, half of them 1.
    assert spread == pytest.approx(22 / 3 - (7 / 3) ** 2, abs=0.5)
    pace.passed(np.zeros(0, np.int64), np.zeros(0, np.int32))
    assert pace.usual(1)[0] == usual
