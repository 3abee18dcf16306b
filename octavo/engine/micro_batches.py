"""Which requests a step takes where several steps are under way at once, one in each pipeline stage."""

from __future__ import annotations

import numpy as np

from octavo.engine.slots import Slots


class MicroBatches:
    """Divides the running requests among the steps that are under way together.

    A request whose token is being sampled by one of the last `stages - 1` steps has no rows: the first stage
    could not know the token in time. (Chunks of a prompt may follow each other: they need no token.) And of
    those that could run, a step takes about as many as leave the others in flight their share.
    """

    def __init__(self, slots: Slots, stages: int):
        self._slots = slots
        self._stages = stages

    def choose(self, run: np.ndarray, need: np.ndarray, next_id: int, divide: bool) -> int:
        """Take the rows from requests that have to wait; returns how many one-row requests the step may have.

        Args:
            run: int64 `[n]`, the running requests' slots.
            need: int32 `[n]`, tokens of each that could be computed, those of steps in flight as if they were
                known; changed.
            next_id: number of the step.
            divide: whether to leave some for other steps; otherwise all that can run may.
        """
        if self._stages == 1:
            return len(run)
        slots = self._slots
        decoding = int((need == 1).sum())
        sampled = slots.sampled_in[run]
        waits = (slots.num_known[run] < slots.num_tokens[run]) & (next_id - sampled < self._stages)
        need[waits] = 0
        if not divide:
            return len(run)
        free = int((need == 1).sum())
        under_way = len(np.unique(sampled[waits]))
        return min(-(-decoding // self._stages), -(-free // max(1, self._stages - under_way)))
