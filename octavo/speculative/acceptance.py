"""How likely drafts are to stand: measured for each sort of proposal and position, and for each request."""

from __future__ import annotations

import numpy as np

_MEMORY = 200.0  # trials that a rate remembers
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0
_OWN_WEIGHT = 6.0  # trials of a request's own that weigh as much as what all others tell
_OWN_FADE = 0.9


class Acceptance:
    """Counts, with a fading memory, how many drafts that were judged stood.

    A draft is judged if all before it stood. `rate[kind, j]` is the share of judged drafts at position j that
    stood, and what is expected of a request that has none behind it; its own of late come to weigh more.
    """

    def __init__(self, num_slots: int, num_kinds: int, most: int):
        self._judged = np.full((num_kinds, most), _PRIOR_WEIGHT)
        self._stood = np.full((num_kinds, most), _PRIOR * _PRIOR_WEIGHT)
        self._own_judged = np.zeros(num_slots)
        self._own_stood = np.zeros(num_slots)

    def enter(self, slot: int) -> None:
        """Another request has come into a slot."""
        self._own_judged[slot] = self._own_stood[slot] = 0.0

    def odds(self, slots: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """How likely each draft is to stand together with all before it, float64 `[n, most]`.

        Args:
            slots, kinds: integer `[n]`.
        """
        rate = self._stood[kinds] / self._judged[kinds]
        stood, judged = self._own_stood[slots], self._own_judged[slots]
        rate = (stood[:, None] + _OWN_WEIGHT * rate) / (judged + _OWN_WEIGHT)[:, None]
        return np.cumprod(np.minimum(rate, 0.99), axis=1)

    def judged(self, slots: np.ndarray, kinds: np.ndarray, drafted: np.ndarray, stood: np.ndarray) -> None:
        """Take in what the verifier said of some drafts.

        Args:
            slots, kinds: integer `[n]`.
            drafted: integer `[n]`, drafts of each.
            stood: integer `[n]`, how many leading ones of them stood.
        """
        for slot, kind, count, good in zip(
            slots.tolist(), kinds.tolist(), drafted.tolist(), stood.tolist(), strict=True
        ):
            trials = min(good + 1, count)
            judged, stands = self._judged[kind, :trials], self._stood[kind, :trials]
            fade = np.where(judged >= _MEMORY, 1 - 1 / _MEMORY, 1.0)
            judged *= fade
            stands *= fade
            judged += 1
            stands[:good] += 1
            self._own_judged[slot] = _OWN_FADE * self._own_judged[slot] + trials
            self._own_stood[slot] = _OWN_FADE * self._own_stood[slot] + good
