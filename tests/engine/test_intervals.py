"""Inter-token latency: the time between steps that yield tokens of one request."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.intervals import TokenIntervals
from octavo.engine.request import Request
from octavo.kv.keys import NO_EXTRAS
from octavo.kv.manager import Sequence
from octavo.messages import TOKEN_BOUNDS
from tests.engine import simulation as sim


def in_slot(slot: int) -> Request:
    return Request(sim.request("r", [1]), (0, 0), np.zeros(1, np.int32), Sequence(NO_EXTRAS, [], []), slot)


def test_gaps_are_a_request_s_own_and_span_preemption() -> None:
    intervals = TokenIntervals(3)
    first, second = in_slot(0), in_slot(2)
    intervals.enter(first)
    intervals.observe(np.array([0]), 100.0)
    assert sum(intervals.counted.counts) == 0  # the first token ends no gap
    intervals.enter(second)
    intervals.observe(np.array([0, 2]), 100.02)
    intervals.observe(np.array([2]), 100.5)
    intervals.leave(first)
    intervals.enter(in_slot(0))  # somebody else, for whom what was before is nothing
    intervals.observe(np.array([0]), 101.0)
    first.slot = 1
    intervals.enter(first)
    intervals.observe(np.array([1]), 103.02)
    counted = intervals.counted
    assert counted.total == pytest.approx(0.02 + 0.48 + 3.0)
    assert len(counted.counts) == len(TOKEN_BOUNDS) + 1
    assert {TOKEN_BOUNDS[i]: n for i, n in enumerate(counted.counts) if n} == {0.025: 1, 0.5: 1, 5.0: 1}


def test_a_value_that_is_a_bound_is_in_the_bucket_below_it() -> None:
    intervals = TokenIntervals(1)
    intervals.enter(in_slot(0))
    for now in (1.0, 1.5, 2.5):
        intervals.observe(np.array([0]), now)
    assert [TOKEN_BOUNDS[i] for i, n in enumerate(intervals.counted.counts) if n] == [0.5, 1.0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("blocks", [64, 24])  # plenty, and so few that requests are preempted
def test_every_token_but_the_first_ends_a_gap(overlap: bool, stream: bool, blocks: int) -> None:
    core = sim.make_core(num_blocks=blocks, async_scheduling=overlap)
    for i in range(8):
        core.add(sim.request(str(i), [i] * (10 + i), 40, stream=stream))
    sim.run(core)
    stats = core.stats()
    assert (stats.num_preemptions > 0) == (blocks < 64)
    assert stats.generation_tokens == 8 * 40
    assert sum(stats.token_intervals.counts) == 8 * 39
    assert stats.token_intervals.total > 0


def test_the_tokens_of_a_step_are_one_gap() -> None:
    settings = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    core = sim.make_core(speculative_config=settings)
    sim.draft(core, sim.Guesser(1.0))
    core.add(sim.request("r", [1, 2, 3], 40))
    outputs = sim.run(core)["r"]
    stats = core.stats()
    assert stats.spec_accepted_tokens > 0
    assert sum(stats.token_intervals.counts) == len(outputs) - 1 < 39
