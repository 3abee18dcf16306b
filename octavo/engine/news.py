"""What requests are told after a step: their new tokens, in the shortest way that does."""

from __future__ import annotations

import numpy as np

from octavo.engine.request import Request
from octavo.messages import CoreOutput


class News:
    """Keeps, by slot, what a request has been told, and makes its outputs.

    Invariant: each token that is known is told once, in order, whatever slots the request passes through.
    """

    def __init__(self, num_slots: int):
        self._streams = np.zeros(num_slots, bool)
        self._num_reported = np.zeros(num_slots, np.int32)  # output tokens that have left the core
        self._terse = np.zeros(num_slots, bool)  # streams tokens and nothing else, the first of them told
        self._ids = [""] * num_slots

    def enter(self, request: Request) -> None:
        """A request has come into its slot."""
        slot = request.slot
        self._streams[slot] = request.core.stream
        self._num_reported[slot] = request.num_reported
        self._terse[slot] = False
        self._ids[slot] = request.core.request_id

    def leave(self, request: Request) -> None:
        """A request leaves its slot."""
        request.num_reported = int(self._num_reported[request.slot])

    def tell(
        self, slots: np.ndarray, tokens: np.ndarray, may_end: np.ndarray
    ) -> tuple[list[CoreOutput], np.ndarray]:
        """News of the requests that have one new token and nothing else to tell.

        Args:
            slots: integer `[n]`, requests that have a new token each.
            tokens: integer `[n]`.
            may_end: bool `[n]`, those whose end the token may be; they are left to the caller.

        Returns:
            The outputs, and the indexes of the others that have news, for `report`.
        """
        terse = self._terse[slots] & ~may_end
        rest = np.flatnonzero((may_end | self._streams[slots]) & ~terse)
        if not terse.any():
            return [], rest
        told = slots[terse]
        self._num_reported[told] += 1
        ids = self._ids
        outputs = [
            CoreOutput(ids[slot], [token])
            for slot, token in zip(told.tolist(), tokens[terse].tolist(), strict=True)
        ]
        return outputs, rest

    def report(self, request: Request, known: np.ndarray) -> CoreOutput:
        """What is new of a request since the last report.

        Args:
            request: in a slot or not.
            known: all its known tokens.
        """
        slot, core = request.slot, request.core
        reported = request.num_reported if slot < 0 else int(self._num_reported[slot])
        new = known[request.prompt_len + reported :].tolist()
        output = CoreOutput(core.request_id, new, num_cached_tokens=max(request.num_cached, 0))
        output.pooled = request.pooled
        if core.params.logprobs is not None:
            output.logprobs, request.logprobs = request.logprobs, []
        if reported == 0:
            output.metrics = request.metrics
            if core.params.prompt_logprobs is not None:
                output.prompt_logprobs = request.prompt_logprobs or None
        request.num_reported = reported + len(new)
        if slot >= 0:
            self._num_reported[slot] = request.num_reported
            self._terse[slot] = core.stream and core.params.logprobs is None
        return output
