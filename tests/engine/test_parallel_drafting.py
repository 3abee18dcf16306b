"""What drafts of one pass are taken to cost: by passes as measured, nearly the same for few and many."""

import numpy as np
import pytest

from octavo.engine.parallel_drafting import ParallelDrafting
from octavo.engine.slots import Slots
from octavo.engine.worker_drafting import WorkerDrafting
from tests.engine import simulation as sim


def made(kind: type[WorkerDrafting]) -> WorkerDrafting:
    core = sim.make_core(max_num_seqs=4)
    slots: Slots = core.scheduler._slots
    return kind(None, slots, 8, True, 64, 256, 200)  # type: ignore[arg-type]


def choose(drafting: WorkerDrafting, plain: float, per_row: float, odds: float) -> int:
    """Drafts of a lone request, where steps of r rows take `plain` + r * `per_row` seconds."""
    for rows in range(1, 10):
        for _ in range(3):
            drafting.adaptation.times.add(rows, plain + rows * per_row)
    stood = round(8 * odds)
    for _ in range(300):
        slots = np.zeros(1, np.int64)
        drafting.adaptation.acceptance.judged(slots, slots, np.array([8]), np.array([stood]))
    able, known = np.array([True]), np.array([20])
    drafting.slots.max_total[0] = 200
    return int(drafting._choose(np.array([0]), able, known, 1)[0])


@pytest.mark.parametrize("kind", [WorkerDrafting, ParallelDrafting])
def test_time_is_learned(kind: type[WorkerDrafting]):
    drafting = made(kind)
    for most in (2, 8):
        for _ in range(4):
            # As slow for many as for few: a pass that reads weights.
            drafting._took(np.array([most, 0], np.int32), 0.5)
    got = drafting._drafting_seconds(1, np.arange(9), 1.0)
    assert got[0] == 0.0
    if kind is ParallelDrafting:
        assert got[1:] == pytest.approx([0.5] * 8, rel=0.15)
    else:
        assert got[8] > 3 * got[2] > 0


def test_a_pass_that_costs_the_same_is_used_to_the_full():
    """Half a plain step for a pass, little for rows: as many drafts as stand are made; one by one, at that
    price each, none pays."""
    for kind, want in ((ParallelDrafting, 8), (WorkerDrafting, 0)):
        drafting = made(kind)
        for _ in range(4):
            drafting._took(np.array([8], np.int32), 0.5 if kind is ParallelDrafting else 4.0 * 2)
            drafting._took(np.array([1], np.int32), 0.5 if kind is ParallelDrafting else 1.0)
        drafting.adaptation._credit = -1.0  # no trial
        assert choose(drafting, 1.0, 0.001, 1.0) == want


def test_nothing_measured_yet_is_one_pass_for_any_number():
    drafting = made(ParallelDrafting)
    assert drafting._drafting_seconds(2, np.array([0, 1, 8]), 1.0).tolist() == [0.0, 0.3, 0.3]
