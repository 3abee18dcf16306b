"""Drafts that end for lack of confidence, over a pretended clock: more tokens a second where texts are easy
and hard by turns, and no fewer elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.engine.draft_stops import DraftStops
from octavo.engine.worker_drafting import WorkerDrafting
from octavo.kv.draft_blocks import DraftBlocks
from octavo.kv.draft_pages import draft_pages
from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.pool import BlockPool
from octavo.messages import CoreStats
from octavo.step_messages import StepResult

MOST, STEPS = 8, 2500
PLAIN, ROW, PASS = 10.0, 1.0, 2.0  # milliseconds of a step, of another row, and of a pass of the draft


def rate(sure: Any, learns: bool, worth: float = 1.0) -> tuple[float, float]:
    """Tokens a millisecond of one request, and the share of drafts that stood.

    Args:
        sure: from a generator to how sure the draft is of its next tokens: float `[MOST]`.
        learns: whether drafts end for lack of confidence.
        worth: how often the draft is right, as a part of how sure it is.
    """
    slots = SimpleNamespace(
        num_tokens=np.array([100]), num_known=np.array([100]), max_total=np.array([1 << 30]),
        num_drafts=np.zeros(1, np.int32), masked=np.zeros(1, bool), in_doubt=np.zeros(1, np.int64),
        on_enter=[], on_leave=[], running=np.zeros(1, np.int64),
    )  # fmt: skip
    groups = [KVGroup("full", (0,), KVFormat("float32", 16, 1, 1))]
    blocks = DraftBlocks(groups, draft_pages(groups, groups, 1 << 14), BlockPool(1 << 14), 1)
    stops = DraftStops(1, MOST, None) if learns else None
    bounds: Any = (blocks, slots, MOST, True, 64, 64, 1 << 29, stops)
    drafting = WorkerDrafting(*bounds)
    draw, stats = np.random.default_rng(0), CoreStats()
    one, live = np.zeros(1, np.int64), np.ones(1, bool)
    clock, tokens, chances = 0.0, 0, np.zeros(MOST)
    for _ in range(STEPS):
        rows = np.ones(1, np.int32)
        drafting.propose(one, rows, 64)
        drafts = int(rows[0]) - 1
        right = draw.random(MOST) < worth * chances
        stood = int(np.cumprod(right[:drafts]).sum())
        slots.num_tokens += 1 + stood
        tokens += 1 + stood
        order = drafting.plan_next(one, rows, live)
        seconds = PLAIN + ROW * drafts
        result = StepResult(np.zeros((1, 1), np.int32), np.array([1 + stood]))
        chances = sure(draw)
        if order is not None:
            asked, products = int(order.counts[0]), np.cumprod(chances)
            made = passes = asked
            if order.thresholds is not None:
                least, going = order.thresholds
                made = passes = 0
                while passes < asked and (not passes or products[passes - 1] >= max(least, going)):
                    made += int(products[passes] >= least)
                    passes += 1
                told = np.where(np.arange(MOST) < passes, products, 0.0).astype(np.float32)
                result.drafted, result.products = np.array([made], np.int32), told[None, :asked]
            result.draft_seconds = PASS * passes
        clock += seconds + result.draft_seconds
        plan: Any = SimpleNamespace(
            slots=one, num_drafts=np.array([drafts]), num_rows=rows, samples=live, admissions=[],
            total_rows=1 + drafts, propose=order, step_id=0,
        )  # fmt: skip
        drafting.timed(plan, result, seconds + result.draft_seconds)
        if drafts:
            drafting.judged(plan, live, result, stats)
        drafting.drafted(plan, live, result)
    return tokens / clock, stats.spec_accepted_tokens / max(stats.spec_draft_tokens, 1)


def by_turns(draw: np.random.Generator) -> np.ndarray:
    """Every text is easy up to some place, and then a guess."""
    chances = np.full(MOST, 0.97)
    chances[draw.integers(0, MOST + 1) :] = 0.15
    return chances


@pytest.mark.parametrize(("worth", "gain"), [(1.0, 1.1), (0.8, 1.01)])
def test_easy_and_hard_by_turns(worth: float, gain: float):
    (plain, share), (learned, kept) = (rate(by_turns, learns, worth) for learns in (False, True))
    assert learned > gain * plain, (plain, learned)
    assert kept > share + 0.05
    assert plain > 1 / PLAIN


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.6, 0.9, 0.99])
def test_texts_of_one_kind_lose_nothing(chance: float):
    same = lambda draw: np.full(MOST, chance)  # noqa: E731
    (plain, _), (learned, _) = (rate(same, learns) for learns in (False, True))
    assert learned > 0.97 * max(plain, 1 / PLAIN), (plain, learned)
