"""Where a draft ends by its own confidence, and what that confidence turns out to be worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.engine.draft_stops import DraftStops
from octavo.speculative.calibration import Calibration
from octavo.speculative.confidence import Confidence


def test_a_draft_ends_before_the_token_with_which_the_product_is_too_low():
    torch.manual_seed(0)
    n, most, threshold, going = 60, 5, 0.3, 0.5
    logits = torch.randn(most, n, 6) * 2
    tokens = torch.randint(0, 6, (most, n), dtype=torch.int32)
    for j in range(most):  # most drafts take what is likely
        tokens[j, : n * 3 // 4] = logits[j, : n * 3 // 4].argmax(-1)
    seen = Confidence(n, most, (threshold, going), torch.device("cpu"))
    places = np.arange(n)
    for j in range(most):
        kept = seen.take(places, j, logits[j, places], tokens[j, places])
        places = places[kept]
    chances = logits.double().softmax(-1).gather(-1, tokens[..., None].long())[..., 0].T
    products = chances.cumprod(1)
    may_go = torch.cat((torch.ones(n, 1), (products[:, :-1] >= going).int().cumprod(1)), 1).bool()
    want = ((products >= threshold) & may_go).int().cumprod(1).sum(1)
    assert seen.made.tolist() == want.tolist() and len(set(want.tolist())) > 3
    for i, told in enumerate(may_go.sum(1).tolist()):
        torch.testing.assert_close(seen.products[i, :told].double(), products[i, :told], atol=1e-5, rtol=0)
        assert not seen.products[i, told:].any()


@pytest.mark.parametrize("worth", [0.5, 1.0, 1.6])
def test_confidence_is_measured_by_what_stands(worth: float):
    """Drafts that are sure by half or too little: the threshold asks for as much as they are worth."""
    draw = np.random.default_rng(0)
    calibration = Calibration()
    assert calibration.threshold(0.5) == pytest.approx(0.5, abs=0.06)  # believed at first
    for _ in range(400):
        products = draw.random(16)
        calibration.add(products, draw.random(16) < np.minimum(1.0, worth * products))
    for odds in (0.2, 0.4):
        assert calibration.threshold(odds) == pytest.approx(odds / worth, abs=0.12)
    if worth == 0.5:
        assert calibration.threshold(0.8) > 1  # no draft is worth that
    assert calibration.threshold(0.0) == 0.0


def test_what_was_measured_is_forgotten_in_time():
    calibration = Calibration()
    for stands in (False, True):
        for _ in range(300):
            calibration.add(np.full(8, 0.52), np.full(8, stands))
    assert calibration.threshold(0.9) == pytest.approx(0.5)


def test_orders_without_a_threshold_come_from_time_to_time():
    stops = DraftStops(4, 3, None)
    asked = [stops.thresholds((0.3, 0.5)) for _ in range(640)]
    assert asked.count((0.0, 0.0)) == 10 and max(asked) == pytest.approx((0.3, 0.5), abs=0.06)
    assert stops.thresholds(None) == (0.0, 0.0)
    assert DraftStops(4, 3, 0.7).thresholds((0.1, 0.2)) == (0.7, 0.0)


def test_drafts_that_ended_count_as_what_was_ordered():
    stops = DraftStops(4, 3, None)
    slots = np.array([1, 3, 0])
    products = np.array([[0.9, 0.5, 0.1], [0.2, 0.0, 0.0], [0.9, 0.8, 0.7]], np.float32)
    stops.ended(slots, np.full(3, 3, np.int32), np.array([2, 0, 3], np.int32), products)
    assert np.all(stops.kept < 1) and np.all(np.diff(stops.kept) <= 0) and stops.kept[2] < stops.kept[0]
    assert stops.passes[0] == 1 > stops.passes[1] >= stops.passes[2]
    # One that the step had no room for is as long as it was judged.
    counted = stops.judged(np.array([1, 0]), np.array([2, 1], np.int32), np.array([2, 0], np.int32))
    assert counted.tolist() == [3, 1]
