"""Drafts of a head that reads the target's hidden states: whose rows it takes in, and in which blocks."""

from __future__ import annotations

import numpy as np

from octavo.engine.request import Request
from octavo.engine.worker_drafting import WorkerDrafting
from octavo.messages import DraftOrder


class HeadDrafting(WorkerDrafting):
    """Lets the head follow every request from its first step in a slot on.

    Hidden states are there in the step that computes them and never again. So what a request finds in the
    prefix cache the head never sees: its own context begins behind that. A request for which there is no
    block in some step, or whose tokens are drawn under a mask, is followed no more until it enters a slot
    anew.
    """

    def __init__(self, *args: object):
        """Arguments as `WorkerDrafting`'s."""
        super().__init__(*args)  # type: ignore[arg-type]
        num_slots = len(self._made)
        self._begin = np.full(num_slots, -1, np.int64)  # position of the head's first row; -1: none yet
        self._lost = np.zeros(num_slots, bool)

    def plan_next(self, slots: np.ndarray, rows: np.ndarray, samples: np.ndarray) -> DraftOrder | None:
        """See `Drafting`."""
        state = self.slots
        for slot in slots[state.masked[slots] & ~self._lost[slots]].tolist():
            self._drop(slot)
        computed = state.num_computed[slots].astype(np.int64)
        begins = ~self._lost[slots] & (self._begin[slots] < 0)
        self._begin[slots[begins]] = (computed - rows)[begins]
        known = state.num_tokens[slots].astype(np.int64)
        counts = self._counts(slots, samples & ~self._lost[slots], known)
        length = computed - self._begin[slots]
        for i in np.flatnonzero(~self._lost[slots]).tolist():
            slot, held = int(slots[i]), int(length[i])
            if counts[i] > 1 and self._blocks.extend(slot, held + int(counts[i]) - 1):
                continue
            counts[i] = min(int(counts[i]), 1)  # which needs no row of its own
            if not self._blocks.extend(slot, held):
                self._drop(slot)
                counts[i] = 0
        follows = ~self._lost[slots]
        self._made[slots[samples]] = counts[samples]
        if not follows.any():
            return None
        others = int((rows - 1 - state.num_drafts[slots]).sum())
        return DraftOrder(counts.astype(np.int32), self._blocks.take_updates(), others, follows)

    def _behind(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        """See `WorkerDrafting`: a head that follows lacks nothing."""
        return np.zeros(len(slots), np.int64)

    def _drop(self, slot: int) -> None:
        super()._drop(slot)
        self._lost[slot] = True

    def enter(self, request: Request) -> None:
        """See `Drafting`."""
        super().enter(request)
        self._begin[request.slot] = -1
        self._lost[request.slot] = False
