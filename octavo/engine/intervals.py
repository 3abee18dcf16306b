"""The time between successive tokens of running requests, counted step by step."""

from __future__ import annotations

import numpy as np

from octavo.engine.request import Request
from octavo.messages import TOKEN_BOUNDS, BucketCounts

_BOUNDS = np.array(TOKEN_BOUNDS)


class TokenIntervals:
    """Owns when the request in each slot got tokens last, and counts the gaps.

    A gap is observed once per step and request, whether its client streams or not and however many tokens the
    step yielded (vLLM's meaning). It spans preemptions: their cost is what the client waited.
    """

    def __init__(self, num_slots: int):
        self._last = np.zeros(num_slots)  # seconds; 0: no token yet
        self._counts = np.zeros(len(TOKEN_BOUNDS) + 1, np.int64)
        self._total = 0.0

    def enter(self, request: Request) -> None:
        """A request has come into its slot."""
        self._last[request.slot] = request.last_token

    def leave(self, request: Request) -> None:
        """A request leaves its slot."""
        request.last_token = float(self._last[request.slot])

    def observe(self, slots: np.ndarray, now: float) -> None:
        """A step has yielded tokens.

        Args:
            slots: integer `[n]`, requests that got at least one, each once.
            now: seconds, by a clock that never goes back.
        """
        before = self._last[slots]
        gaps = now - before[before > 0]
        self._last[slots] = now
        if len(gaps):
            places = np.searchsorted(_BOUNDS, gaps)  # of a value that is a bound: the bucket below it
            self._counts += np.bincount(places, minlength=len(self._counts))
            self._total += float(gaps.sum())

    @property
    def counted(self) -> BucketCounts:
        """The gaps so far, seconds, by `TOKEN_BOUNDS`."""
        return BucketCounts(self._counts.tolist(), self._total)
