"""Admission that looks ahead: what is foreseen, and what that saves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.engine.forecast import Demand, Facts, Forecast
from octavo.engine.limits import SchedulerLimits
from octavo.engine.scheduler import Scheduler
from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.keys import BlockHasher
from octavo.kv.manager import KVManager
from octavo.messages import CoreRequest
from octavo.sampling_params import SamplingParams
from octavo.step_messages import StepResult

SIZE = 16
STOP = 7


def groups(*windows: int | None) -> list[KVGroup]:
    fmt = KVFormat("bfloat16", SIZE, 8, 128)
    return [KVGroup(f"g{g}", (g,), fmt, window) for g, window in enumerate(windows)]


def facts(rows: list[tuple[int, int, int, bool]], pace: float = 1.0, spread: float = 0.0) -> Facts:
    """Of requests: tokens, output tokens of these, limit of output, whether nothing ends them before."""
    tokens, used, limit, certain = (np.array(column) for column in zip(*rows, strict=True))
    same = np.ones(len(rows))
    return Facts(tokens, used, limit, certain.astype(bool), pace * same, spread * same)


def peak_by_steps(rows: list[tuple[int, int, int, bool]]) -> int:
    """The most blocks that requests with certain ends hold, found by going through every step."""
    ends = [(tokens, limit - used) for tokens, used, limit, _ in rows]
    return max(
        sum(-(-(tokens + step) // SIZE) for tokens, left in ends if step < left)
        for step in range(max(left for _, left in ends))
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_of_requests_whose_ends_are_known(seed):
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.randint(2, 60)):
        limit = draw.randint(10, 900)
        used = draw.randrange(limit)
        rows.append((draw.randint(1, 800) + used, used, limit, True))
    forecast = Forecast(groups(None))
    demand = Demand(forecast, forecast.longest(facts(rows)))
    now = sum(-(-tokens // SIZE) for tokens, *_ in rows)
    demand.add(demand.part(facts(rows[:1])))
    found = demand.peak(now, demand.part(facts(rows[1:])))
    assert found == pytest.approx(peak_by_steps(rows), rel=0.06, abs=3)
    assert found >= now
    shared = demand.peak(now // 2, demand.part(facts(rows[1:])))  # half of the blocks are another one's too
    assert shared < found


def test_windows_hold_no_more_than_their_most():
    one = [(1000, 0, 3000, True)]
    full, both = Forecast(groups(None)), Forecast(groups(None, 64))
    peaks = []
    for forecast, now in ((full, 63), (both, 63 + 5)):
        demand = Demand(forecast, 3000)
        peaks.append(demand.peak(now, demand.part(facts(one))))
    assert peaks[0] == pytest.approx(4000 / SIZE, rel=0.03)
    assert peaks[1] - peaks[0] == pytest.approx(5, abs=1)


def test_ends_are_learned_from_those_that_came_before():
    forecast = Forecast(groups(None))
    rows = facts([(100, 0, 1000, False)])
    times = np.array([100.0, 400.0])
    assert forecast.alive(times, rows)[0] == pytest.approx([0.9, 0.6], abs=0.06)
    for _ in range(300):
        forecast.ended(200, 1000, certain=False)
    assert forecast.alive(times, rows)[0].tolist() == [1.0, 0.0]
    assert forecast.longest(rows) == 200
    # One that has gone on for longer than any other goes on to its limit; one with a certain end has it.
    longer = facts([(600, 500, 1000, False), (100, 0, 1000, True)])
    assert forecast.alive(np.array([450.0, 550.0]), longer).tolist() == [[1.0, 0.0], [1.0, 1.0]]


def test_faster_requests_need_their_blocks_sooner_and_end_sooner():
    """One that has 100 tokens left beside one that has 400: by steps, whatever these yield."""
    forecast = Forecast(groups(None))
    short, long = (500, 0, 100, True), (100, 0, 400, True)
    times = np.array([20.0, 40.0, 70.0])
    assert forecast.alive(times, facts([short], pace=2.0)).tolist() == [[True, True, False]]
    assert forecast.longest(facts([short, long], pace=4.0)) == 100

    def peak(pace: tuple[float, float]) -> float:
        first, second = facts([short], pace[0]), facts([long], pace[1])
        demand = Demand(forecast, max(forecast.longest(first), forecast.longest(second)))
        demand.add(demand.part(first))
        return demand.peak(39, demand.part(second))

    # At the first one's end the second has 200 tokens, or 500, or has just begun; alone it has 500.
    assert peak((1.0, 1.0)) == peak((4.0, 4.0)) == pytest.approx((600 + 200) / SIZE, abs=2)
    assert peak((1.0, 4.0)) == pytest.approx((600 + 500) / SIZE, abs=2)
    assert peak((4.0, 1.0)) == pytest.approx((600 + 125) / SIZE, abs=2)


def test_ends_that_chance_decides_are_likely_and_not_certain():
    """400 tokens by steps of 1 or 3: simulated, and as the forecast has it."""
    forecast, times = Forecast(groups(None)), np.array([150.0, 185.0, 195.0, 205.0, 230.0])
    draws = np.random.default_rng(0).choice([1, 3], (4000, 400)).cumsum(axis=1)
    going = [(draws[:, int(t) - 1] < 400).mean() for t in times]
    found = forecast.alive(times, facts([(500, 0, 400, True)], pace=2.0, spread=1.0))[0]
    assert found == pytest.approx(going, abs=0.03)
    assert 0.7 < going[2] < 0.82


@pytest.mark.parametrize("seed", range(8))
def test_requests_at_a_block_s_end_need_another_at_once(seed):
    """Prompts of whole blocks, as benchmarks have them, all take their next block in the same step."""
    draw = random.Random(seed)
    rows = [(SIZE * draw.randint(1, 9), 0, 40, True) for _ in range(6)]
    demand = Demand(Forecast(groups(None)), 40)
    now = sum(tokens // SIZE for tokens, *_ in rows)
    assert demand.peak(now, demand.part(facts(rows))) == peak_by_steps(rows)


def test_caution_follows_preemptions():
    forecast = Forecast(groups(None))
    rows = facts([(100, 0, 1000, False)] * 20)
    demand = Demand(forecast, 1000)
    part = demand.part(rows)
    peaks = [demand.peak(140, part)]
    for _ in range(3):
        forecast.preempted()
        peaks.append(demand.peak(140, part))
    assert peaks == sorted(set(peaks))
    for _ in range(300):
        forecast.ended(500, 1000, certain=True)
    assert demand.peak(140, part) == pytest.approx(peaks[0], rel=0.01)


def simulate(look_ahead: bool, ends_early: bool, share: float, num_seqs: int = 96) -> tuple[int, int, int]:
    """Run 192 requests in room for `share` of what `num_seqs` of them hold in the end.

    Returns:
        Preemptions, steps, and rows computed twice.
    """
    draw = random.Random(1)
    texts = []
    for _ in range(192):
        limit = 512 if ends_early else draw.randint(64, 384)
        output = min(limit, max(1, int(draw.lognormvariate(4.6, 0.8)))) if ends_early else limit
        texts.append((draw.randint(32, 256), output, limit))
    held = [-(-(prompt + output) // SIZE) for prompt, output, _ in texts]
    blocks = int(share * num_seqs * sum(held) / len(held))
    kv = KVManager(groups(None), blocks, BlockHasher("sha256", bytes(32), SIZE))
    scheduler = Scheduler(SchedulerLimits(num_seqs, 2048, 1024, 32000, look_ahead=look_ahead), kv)
    for i, (prompt, _, limit) in enumerate(texts):
        ids = [draw.randrange(1000, 30000) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=limit, detokenize=False)
        eos = [STOP] if ends_early else []
        scheduler.add(CoreRequest(request_id=str(i), prompt_token_ids=ids, params=params, seed=0,
                                  eos_token_ids=eos, stream=False))  # fmt: skip
    steps = rows = 0
    while scheduler.has_requests:
        step = scheduler.schedule()
        assert step is not None, "nothing runs, and requests wait"
        plan = step.plan
        tokens = np.full((len(plan.slots), 1), 5, np.int32)
        for i, slot in enumerate(plan.slots.tolist()):
            number = int(scheduler._slots.at(slot).core.request_id)
            if plan.start[i] + plan.num_rows[i] + 1 >= sum(texts[number][:2]):
                tokens[i] = STOP
        steps += 1
        rows += plan.total_rows
        scheduler.update(step, StepResult(tokens, plan.samples.astype(np.int32)))
    needed = sum(prompt + output - 1 for prompt, output, _ in texts)
    return scheduler.stats.num_preemptions, steps, rows - needed


@pytest.mark.parametrize("ends_early, share", [(False, 0.6), (False, 0.35), (True, 0.6), (True, 0.35)])
def test_few_are_preempted_and_nothing_is_slower(ends_early, share):
    before = simulate(False, ends_early, share)
    after = simulate(True, ends_early, share)
    print(f"preemptions, steps, rows computed twice: {before} -> {after}")
    assert after[0] <= before[0] * 0.7
    assert after[2] <= before[2] * 0.7
    assert after[1] <= before[1] * 1.06
