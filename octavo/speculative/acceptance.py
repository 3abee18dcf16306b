"""How likely drafts are to stand: measured for each sort of proposal and position, and for each request."""

from __future__ import annotations

import numpy as np

_MEMORY = 200.0  # trials that a rate remembers
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0
_OTHERS_WEIGHT = 4.0  # trials of a sort that weigh as much as what all sorts tell
_OWN_WEIGHT = 6.0  # trials of a request's own that weigh as much as what all others tell
_OWN_FADE = 0.9


class Acceptance:
    """Counts, with a fading memory, how many drafts that were judged stood.

    A draft is judged if all before it stood. `rate[kind, j]` is the share of judged drafts at position j that
    stood, and what is expected of a request that has none behind it; its own of late come to weigh more. Of a
    sort of which little is known yet is expected what all sorts together told.
    """

    def __init__(self, num_slots: int, num_kinds: int, most: int):
        # By sort, the last one all of them; and position.
        self._judged = np.zeros((num_kinds + 1, most))
        self._stood = np.zeros((num_kinds + 1, most))
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
        usual = (self._stood[-1] + _PRIOR * _PRIOR_WEIGHT) / (self._judged[-1] + _PRIOR_WEIGHT)
        rate = (self._stood[kinds] + _OTHERS_WEIGHT * usual) / (self._judged[kinds] + _OTHERS_WEIGHT)
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
            for sort in (kind, -1):
                judged, stands = self._judged[sort, :trials], self._stood[sort, :trials]
                fade = np.where(judged >= _MEMORY, 1 - 1 / _MEMORY, 1.0)
                judged *= fade
                stands *= fade
                judged += 1
                stands[:good] += 1
            self._own_judged[slot] = _OWN_FADE * self._own_judged[slot] + trials
            self._own_stood[slot] = _OWN_FADE * self._own_stood[slot] + good
