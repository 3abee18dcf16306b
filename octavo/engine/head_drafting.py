"""Drafts of a head that reads the target's hidden states: whose rows it takes in, and in which blocks."""

from __future__ import annotations

import numpy as np

from octavo.engine.request import Request
from octavo.engine.worker_drafting import WorkerDrafting
from octavo.step_messages import DraftOrder

# Where drafts don't pay, following has no use, and costs about a layer of each step. A request that was not
# drafted for in so many steps is left alone for so many; so is one whose blocks were needed elsewhere.
_PATIENCE, _REST = 16, 256


class HeadDrafting(WorkerDrafting):
    """Lets the head follow every request from its first step in a slot on.

    Hidden states are there in the step that computes them and never again. So what a request finds in the
    prefix cache the head never sees: its own context begins behind that. A request whose tokens are drawn
    under a mask is not followed until it enters a slot anew; one for which drafts don't pay, or for which
    there was no block in some step, is left alone for a while, and the head's context then begins there.
    """

    def __init__(self, *args: object):
        """Arguments as `WorkerDrafting`'s."""
        super().__init__(*args)  # type: ignore[arg-type]
        num_slots = len(self._made)
        self._begin = np.full(num_slots, -1, np.int64)  # position of the head's first row; -1: none yet
        self._lost = np.zeros(num_slots, bool)
        self._idle = np.zeros(num_slots, np.int64)  # steps with a token and no drafts, one after another

    def plan_next(self, slots: np.ndarray, rows: np.ndarray, samples: np.ndarray) -> DraftOrder | None:
        """See `Drafting`."""
        state = self.slots
        for slot in slots[state.masked[slots] & ~self._lost[slots]].tolist():
            self._drop(slot)
        self._begin_order()
        self._rest(slots)
        computed = state.num_computed[slots].astype(np.int64)
        begins = ~self._lost[slots] & ~self._resting(slots) & (self._begin[slots] < 0)
        begins &= state.in_doubt[slots] == 0  # else it isn't known where the rows are
        self._begin[slots[begins]] = (computed - rows)[begins]
        known = state.num_tokens[slots].astype(np.int64)
        follows = self._begin[slots] >= 0
        counts = self._counts(slots, samples & follows, known, int(samples.sum()))
        length = computed - self._begin[slots]
        for i in np.flatnonzero(follows).tolist():
            slot, held = int(slots[i]), int(length[i])
            if counts[i] > 1 and self._room(slot, held + int(counts[i]) - 1):
                continue
            counts[i] = min(int(counts[i]), 1)  # which needs no row of its own
            if not self._room(slot, held):
                self._give_up(slot)
                counts[i] = 0
        follows = self._begin[slots] >= 0
        self._last_order[slots[follows]] = self._orders
        steps = self._idle[slots] + (self.adaptive | self._resting(slots))
        self._idle[slots[samples]] = np.where(counts > 0, 0, steps)[samples]
        self._made[slots[samples]] = counts[samples]
        if not follows.any():
            return None
        others = int((rows - 1 - state.num_drafts[slots]).sum())
        updates = self._blocks.take_updates()
        # Without drafts nothing is to be ended: following alone is replayed.
        thresholds = self._thresholds() if counts.any() else None
        return DraftOrder(counts.astype(np.int32), updates, others, follows, thresholds)

    def _resting(self, slots: np.ndarray) -> np.ndarray:
        return self._idle[slots] >= _PATIENCE

    def _rest(self, slots: np.ndarray) -> None:
        """Leave requests alone whose drafts haven't paid of late, and return to those left long enough."""
        for slot in slots[self._resting(slots) & (self._begin[slots] >= 0)].tolist():
            self._leave_alone(slot)
        self._idle[slots[self._idle[slots] >= _PATIENCE + _REST]] = 0

    def _behind(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        """See `WorkerDrafting`: a head that follows lacks nothing."""
        return np.zeros(len(slots), np.int64)

    def _leave_alone(self, slot: int) -> None:
        super()._drop(slot)
        self._begin[slot] = -1

    def _give_up(self, slot: int) -> None:
        """See `WorkerDrafting`."""
        self._leave_alone(slot)
        self._idle[slot] = _PATIENCE

    def _drop(self, slot: int) -> None:
        self._leave_alone(slot)
        self._lost[slot] = True

    def enter(self, request: Request) -> None:
        """See `Drafting`."""
        super().enter(request)
        self._begin[request.slot] = -1
        self._lost[request.slot] = False
        self._idle[request.slot] = 0
