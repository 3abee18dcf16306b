"""Requests that let another one compute the beginning that both have."""

from __future__ import annotations

import numpy as np

from octavo.engine.request import Request
from octavo.engine.slots import Slots


class Followers:
    """Owns requests that could begin and wait instead: a running prompt's next tokens are theirs too.

    One that began now would compute, beside the other, what it finds in the cache once the other has. So of
    equal prompts that take several steps (`n` choices, questions about one document) the first is computed,
    and the others find its blocks.

    Invariant: whom a request waits for is before it in the order, in a slot, and still has tokens to compute
    that both have; so no two wait for each other. Followers hold neither slot nor blocks.
    """

    def __init__(self, slots: Slots, block_size: int):
        self._slots, self._block_size = slots, block_size
        # Whom each waits for, as slot and epoch, and how many tokens that one has to have computed.
        self._waits_for: dict[Request, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self._waits_for)

    def take(self, request: Request, num_cached: int) -> bool:
        """Let a request wait if a running one will spare it at least half of its rows; whether it waits now.

        Args:
            num_cached: tokens that it would find in the cache, a multiple of the block size.
        """
        slots, size = self._slots, self._block_size
        own = request.token_ids
        most = (len(own) - 1) // size * size  # at least one token is computed
        least = num_cached + max(size, (len(own) - num_cached + 1) // 2)
        if least > most:
            return False
        run = slots.running
        computed = slots.num_computed[run]
        for slot in run[(slots.num_known[run] >= least) & (computed < slots.num_known[run])].tolist():
            other = slots.at(slot)
            if other.order > request.order:
                return False
            theirs = slots.tokens[slot, : slots.num_known[slot]]
            if other.seq.extras != request.seq.extras or theirs[least - 1] != own[least - 1]:
                continue
            count = min(most, len(theirs))
            differ = np.flatnonzero(own[:count] != theirs[:count])
            shared = (int(differ[0]) if len(differ) else count) // size * size
            if shared >= least and slots.num_computed[slot] < shared:
                self._waits_for[request] = slot, int(slots.epoch[slot]), shared
                return True
        return False

    def ready(self) -> list[Request]:
        """Take out those that need not wait any longer."""
        slots = self._slots
        ready = [
            request
            for request, (slot, epoch, tokens) in self._waits_for.items()
            if slots.epoch[slot] != epoch or slots.num_computed[slot] >= tokens
        ]
        for request in ready:
            del self._waits_for[request]
        return ready

    def drop(self, request: Request) -> bool:
        """A request ends; whether it was one of these."""
        return self._waits_for.pop(request, None) is not None
