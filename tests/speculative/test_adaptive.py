"""How many tokens are drafted: the best by measured rates, none where none pay, at little cost."""

import numpy as np
import pytest

from octavo.speculative.acceptance import Acceptance
from octavo.speculative.adaptive import Adaptation
from octavo.speculative.step_times import StepTimes


def test_acceptance_finds_the_rates_of_each_position_and_sort():
    rng = np.random.default_rng(0)
    acceptance = Acceptance(2, 2, 3)
    rates = np.array([[0.9, 0.5, 0.2], [0.3, 0.3, 0.3]])
    for _ in range(4000):
        kinds = rng.integers(0, 2, 2)
        stood = [int(np.cumprod(rng.random(3) < rates[kind]).sum()) for kind in kinds]
        acceptance.judged(np.array([0, 1]), kinds, np.array([3, 3]), np.array(stood))
    acceptance.enter(0)
    odds = acceptance.odds(np.zeros(2, np.int64), np.array([0, 1]))
    np.testing.assert_allclose(odds, np.cumprod(rates, axis=1), atol=0.1)
    assert abs(odds[0, 0] - 0.9) < 0.08


def test_a_request_whose_drafts_fail_is_trusted_less():
    acceptance = Acceptance(2, 1, 2)
    for _ in range(50):
        acceptance.judged(np.array([0, 1]), np.zeros(2, np.int64), np.array([2, 2]), np.array([2, 0]))
    good, bad = acceptance.odds(np.array([0, 1]), np.zeros(2, np.int64))
    assert good[0] > 0.8 and bad[0] < 0.2
    acceptance.enter(1)
    assert acceptance.odds(np.array([1]), np.zeros(1, np.int64))[0, 0] > bad[0]


def test_times_between_and_beyond_what_was_measured():
    times = StepTimes()
    assert times.curve(1, 3) is None
    for _ in range(50):
        times.add(4, 0.010)
        times.add(16, 0.016)
    np.testing.assert_allclose(times.curve(4, 13), 0.010 + 0.0005 * np.arange(13), rtol=1e-6)
    np.testing.assert_allclose(times.curve(64, 1), 0.040, rtol=1e-6)
    for _ in range(50):
        times.add(8, 0.001)  # noise: a larger step is never quicker
    assert (np.diff(times.curve(1, 64)) >= 0).all()
    times.add(4, 100.0)  # a hiccup
    assert times.curve(4, 1)[0] < 0.0106


def test_beyond_what_was_measured_times_rise_as_from_the_steps_at_hand_on():
    """A second row costs much, as on a GPU, where other kernels serve one row; those beyond hardly any."""
    times = StepTimes()
    for rows, seconds in ((1, 4e-3), (2, 5e-3), (16, 5.1e-3), (64, 5.4e-3)):
        for _ in range(5):
            times.add(rows, seconds)
    assert times.curve(16, 113)[-1] == pytest.approx(5.8e-3)  # of 128 rows
    assert times.curve(1, 128)[-1] == pytest.approx(5.4e-3 + 64 * 1.4e-3 / 63)
    assert times.curve(64, 65)[-1] == times.curve(1, 128)[-1]  # of one size at hand nothing follows


def simulate(
    rate: float, cost: float, steps: int, requests: int = 1, most: int = 4, idle: float = 0.0
) -> tuple[float, float]:
    """Tokens per second with drafts over that without, and drafts per step, where a step of n requests takes
    10 ms and each row more than n takes `cost` of that, and a step for which drafts are proposed begins
    `idle` seconds late."""
    rng = np.random.default_rng(1)
    adaptation = Adaptation(requests, 1, most)
    slots, kinds = np.arange(requests), np.zeros(requests, np.int64)
    tokens = seconds = drafted = 0.0
    for _ in range(steps):
        counts = np.zeros(requests, np.int64)
        proposing = 0.0
        odds = adaptation.acceptance.odds(slots, kinds)
        if adaptation.awake and (not idle or adaptation.promises(odds, requests, requests * most)):
            proposing = max(idle, 20e-6 * requests)
            counts = adaptation.choose(odds, requests, requests * most)
            adaptation.proposed(proposing)
        stood = np.array([int(np.cumprod(rng.random(c) < rate).sum()) for c in counts])
        if counts.any():
            some = counts > 0
            adaptation.acceptance.judged(slots[some], kinds[some], counts[some], stood[some])
        duration = 0.010 * (1 + cost * counts.sum() / requests) * rng.uniform(0.95, 1.05)
        adaptation.times.add(requests + int(counts.sum()), duration)
        adaptation.passed(duration)
        tokens += requests + stood.sum()
        seconds += duration + proposing
        drafted += counts.sum()
    return tokens / seconds / (requests / 0.010), drafted / steps / requests


def test_drafts_that_stand_and_cost_little_are_all_made():
    speed, drafts = simulate(0.9, 0.02, 1000)
    assert drafts > 3.5
    assert speed > 0.93 * (1 - 0.9**5) / 0.1 / 1.08


def test_drafts_that_never_stand_cost_at_most_three_percent():
    for requests in (1, 64):
        speed, drafts = simulate(0.0, 0.1, 2000, requests)
        assert speed > 0.97
        assert drafts < 0.2


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.9])
def test_waiting_for_tokens_to_draft_from_is_weighed_too(rate: float):
    """Where the device computes beside the host, and stands still for a tenth of a step meanwhile."""
    speed, drafts = simulate(rate, 0.02, 2000, idle=0.001)
    if rate > 0.5:
        assert drafts > 3.5 and speed > 0.93 * (1 - rate**5) / (1 - rate) / (1.08 + 0.1)
    else:
        assert speed > 0.97


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_a_pause_of_the_host_does_not_end_drafting(rate: float):
    """A step that begins a thousand steps late says nothing of what proposing takes, whatever pays then."""
    adaptation, slots, kinds = Adaptation(1, 1, 4), np.zeros(1, np.int64), np.zeros(1, np.int64)

    def step(late: float) -> int:
        odds = adaptation.acceptance.odds(slots, kinds)
        counts = np.zeros(1, np.int64)
        if adaptation.awake and adaptation.promises(odds, 1, 4):
            counts = adaptation.choose(odds, 1, 4)
            adaptation.proposed(late)
        if counts.any():
            adaptation.acceptance.judged(slots, kinds, counts, np.array([round(4 * rate)]))
        adaptation.times.add(1 + int(counts.sum()), 0.01 * (1 + 0.02 * counts.sum()))
        adaptation.passed(0.01)
        return int(counts.sum())

    for _ in range(100):
        step(1e-4)
    adaptation.looked(10.0)
    adaptation.proposed(10.0)
    for _ in range(4000):
        step(1e-4)
    assert sum(step(1e-4) for _ in range(1000)) > (3000 if rate else 0)


def test_drafts_that_cost_as_much_as_they_yield_cost_at_most_three_percent():
    for requests in (1, 64):
        speed, _ = simulate(0.6, 1.0, 2000, requests)
        assert speed > 0.97


def test_a_middle_course_is_found():
    """Half of the drafts stand, and a row costs a fifth: one or two drafts are best."""
    speed, drafts = simulate(0.5, 0.2, 3000)
    best = max((1 - 0.5 ** (k + 1)) / 0.5 / (1 + 0.2 * k) for k in range(5))
    assert speed > 0.96 * best
    assert 0.8 < drafts < 2.7


@pytest.mark.parametrize("most", [1, 5, 8, 30])
def test_equally_likely_drafts_are_no_more_than_may_be(most: int):
    """Ten requests of which nothing is known, and steps that take as long whatever their rows."""
    adaptation = Adaptation(10, 1, 4)
    for rows in (10, 64):
        for _ in range(5):
            adaptation.times.add(rows, 0.01)
    adaptation.passed(0.01)
    odds = adaptation.acceptance.odds(np.arange(10), np.zeros(10, np.int64))
    counts = adaptation.choose(odds, 10, most)
    assert counts.sum() == most and counts.max() - counts.min() <= 1
