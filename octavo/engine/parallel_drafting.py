"""Drafts that a model makes all in one pass: what they cost by how many they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.engine.worker_drafting import PRIOR_COST, WorkerDrafting
from octavo.speculative.step_times import StepTimes


class ParallelDrafting(WorkerDrafting):
    """Weighs drafts of which more cost little more: where reading weights is what takes time, a pass over
    k rows takes about as long as one over one row. So passes are timed by their drafts, not draft by draft.
    """

    def __init__(self, *args: Any):
        """Arguments as `WorkerDrafting`'s."""
        super().__init__(*args)
        self._passes = StepTimes()  # by the drafts of all requests together

    def _drafting_seconds(self, n: int, counts: np.ndarray, plain: float) -> np.ndarray:
        """See `WorkerDrafting`."""
        total = n * counts
        curve = self._passes.curve(1, int(total.max(initial=1)))
        if curve is None:
            return np.where(total > 0, PRIOR_COST * plain, 0.0)
        return np.where(total > 0, curve[np.clip(total - 1, 0, len(curve) - 1)], 0.0)

    def _took(self, counts: np.ndarray, seconds: float) -> None:
        """See `WorkerDrafting`."""
        self._passes.add(int(counts.sum()), seconds)
