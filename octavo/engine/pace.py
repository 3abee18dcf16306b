"""How many tokens a step yields each request: more than one where drafts stand."""

from __future__ import annotations

import numpy as np

_FADE = 0.1  # weight of a request's last step among its own
_USUAL_FADE = 0.01  # of each among those of all


class Pace:
    """Owns the mean tokens of late of a step of each running request, and of their squares.

    A request that has just begun is taken to be as others were of late.
    """

    def __init__(self, num_slots: int):
        self._moments = np.ones((2, num_slots))
        self._usual = np.ones(2)

    def enter(self, slot: int) -> None:
        """Another request has come into a slot."""
        self._moments[:, slot] = self._usual

    def passed(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """A step has yielded so many tokens of some requests (integer `[n]` both), at least one of each."""
        if not len(slots):
            return
        seen = np.stack((counts, counts**2)).astype(np.float64)
        self._moments[:, slots] += _FADE * (seen - self._moments[:, slots])
        self._usual += min(1.0, _USUAL_FADE * len(slots)) * (seen.mean(axis=1) - self._usual)

    def of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that a step yields each one, and the variance of that, float64 `[n]` both."""
        return _described(self._moments[:, slots])

    def usual(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of so many requests that are in no slot."""
        return _described(np.repeat(self._usual[:, None], count, axis=1))


def _described(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, square = moments
    return mean, np.maximum(square - mean**2, 0.0)
