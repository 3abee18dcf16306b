"""What drafting costs where its time is told one step later: fakes for the workers, and a counted clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.engine.worker_drafting import WorkerDrafting
from octavo.kv.draft_blocks import DraftBlocks
from octavo.kv.draft_pages import draft_pages
from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.pool import BlockPool
from octavo.messages import CoreStats
from octavo.step_messages import DraftOrder, StepResult

PLAIN, ROW, MOST = 4e-3, 2e-5, 5  # seconds; drafts


def run(
    draft_seconds: float,
    chance: float,
    steps: int,
    warm: bool,
    told: bool,
    extra: float,
    stalls: bool = False,
) -> tuple[float, float]:
    """Tokens a second and drafts a step, of the last half.

    Args:
        warm: a plain step takes no longer at first, but the first two drafts of each length do.
        told: results tell which steps took longer to be recorded.
        extra: seconds that first times take longer.
        stalls: the host takes them, while it launches drafts: what it timed as the drafts' own is none of the
            next step's time, from whose launch on that counts.
    """
    slots: Any = SimpleNamespace(
        num_tokens=np.array([100]), num_known=np.array([100]), max_total=np.array([1 << 30]),
        num_drafts=np.zeros(1, np.int32), masked=np.zeros(1, bool), in_doubt=np.zeros(1, np.int64),
        on_enter=[], on_leave=[], running=np.zeros(1, np.int64),
    )  # fmt: skip
    groups = [KVGroup("full", (0,), KVFormat("float32", 16, 1, 1))]
    blocks = DraftBlocks(groups, draft_pages(groups, groups, 1 << 14), BlockPool(1 << 14), 1)
    drafting = WorkerDrafting(blocks, slots, MOST, True, 64, 64, 1 << 29)
    draw, stats, one, live = np.random.default_rng(0), CoreStats(), np.zeros(1, np.int64), np.ones(1, bool)
    clock, tokens, made, seen = 0.0, 0, 0, set[tuple[str, int]]()
    earlier, before = 0.0, -1  # what drafting after the last step takes
    for step in range(steps):
        rows = np.ones(1, np.int32)
        drafting.propose(one, rows, 64)
        drafts = int(rows[0]) - 1
        stood = int(np.cumprod(draw.random(drafts) < chance).sum())
        slots.num_tokens += 1 + stood
        order = drafting.plan_next(one, rows, live)
        late = ("step", drafts) not in seen and not (warm and not drafts)
        seconds = PLAIN + ROW * drafts + extra * late
        seen.add(("step", drafts))
        count = 0 if order is None else int(order.counts[0])
        met = [key for key in (("draft", count), ("again", count)) if key in seen]
        first = count > 0 and len(met) < (2 if warm else 1)
        result = StepResult(np.zeros((1, 1), np.int32), np.array([1 + stood]))
        result.recorded = told and (late or first)
        result.draft_seconds, result.draft_step = earlier, before
        plan: Any = SimpleNamespace(
            slots=one, num_drafts=np.array([drafts]), num_rows=rows, samples=live, admissions=[],
            total_rows=1 + drafts, propose=order, step_id=step,
        )  # fmt: skip
        drafting.timed(plan, result, seconds + (earlier % extra if stalls and extra else earlier))
        if step >= steps // 2:
            clock, tokens, made = clock + seconds + earlier, tokens + 1 + stood, made + drafts
        if drafts:
            drafting.judged(plan, live, result, stats)
        earlier, before = 0.0, -1
        if order is not None:
            earlier, before = draft_seconds * count + extra * first, step
            seen.add(("again" if ("draft", count) in seen else "draft", count))
    return tokens / clock, made / (steps - steps // 2)


@pytest.mark.parametrize("chance", [0.05, 0.6, 0.8])
@pytest.mark.parametrize("draft_seconds", [2e-4, 3e-3])
@pytest.mark.parametrize(
    ("warm", "told", "extra", "stalls"),
    [(False, False, 2.0, False), (True, True, 2.0, False), (True, True, 2.0, True)],
)
def test_as_many_as_pay_are_drafted(
    warm: bool, told: bool, extra: float, stalls: bool, draft_seconds: float, chance: float
) -> None:
    """Even if the first drafts take longer, to be recorded, than what may go into trials for a long time."""
    steps = 4000 if warm else 2000
    rate, drafts = run(draft_seconds, chance, steps, warm, told, extra, stalls)
    by_length = [
        sum(chance**i for i in range(k + 1)) / (PLAIN + k * (ROW + draft_seconds)) for k in range(MOST + 1)
    ]
    assert rate > 0.95 * max(by_length), (rate, by_length)
    assert rate > 0.97 * by_length[0], (rate, by_length)
    assert abs(drafts - int(np.argmax(by_length))) < 1.6


def test_what_a_head_took_to_be_recorded_is_not_taken_off_the_next_step() -> None:
    """The first step that a head follows is recorded; that this took longer is told with the next result."""
    slots: Any = SimpleNamespace(num_tokens=np.zeros(1), on_enter=[], on_leave=[])
    drafting = WorkerDrafting(None, slots, MOST, True, 64, 64, 1 << 29)  # type: ignore[arg-type]
    order = DraftOrder(np.zeros(1, np.int32), [], 0, np.ones(1, bool))
    for step in range(40):
        result = StepResult(np.zeros((1, 1), np.int32), np.ones(1, np.int32))
        result.recorded = step == 0
        result.draft_seconds, result.draft_step = (0.0, 2e-4, 1.7)[(step > 0) + (step == 1)], step - 1
        plan: Any = SimpleNamespace(
            num_drafts=None, num_rows=np.ones(1, np.int32), samples=np.ones(1, bool), admissions=[],
            total_rows=1, propose=order, step_id=step,
        )  # fmt: skip
        drafting.timed(plan, result, PLAIN + result.draft_seconds * (step != 1))
        if step > 2:
            curve = drafting.adaptation.times.curve(1, 1)
            assert curve is not None and curve[0] == pytest.approx(PLAIN)


@pytest.mark.parametrize(("able", "drafts"), [(8, 0), (4, 1), (2, 2), (1, 4)])
def test_rows_of_requests_that_are_not_drafted_for_count(able: int, drafts: int) -> None:
    """Eight requests, and steps of twelve rows at most: others' rows are among these, too."""
    slots: Any = SimpleNamespace(
        num_tokens=np.full(8, 50), max_total=np.full(8, 1000), on_enter=[], on_leave=[]
    )
    drafting = WorkerDrafting(None, slots, MOST, False, 12, 64, 1 << 29)  # type: ignore[arg-type]
    chosen = np.arange(8) < able
    counts = drafting._counts(np.arange(8), chosen, np.full(8, 50), 8)
    assert counts.tolist() == (chosen * drafts).tolist()
