"""Where drafts should end for lack of confidence, and what is learned of drafts that ended so."""

from __future__ import annotations

import numpy as np

from octavo.speculative.calibration import Calibration

_FADE = 0.02
_EVERY = 64  # of so many orders one has no threshold, so that unlikely drafts are judged, too


class DraftStops:
    """Learns how sure a draft must be for its next token to pay, and how long drafts become.

    Attributes:
        kept, passes: float64 `[most]`, the share of drafts asked for that have each place, and for which the
            draft was run there.
    """

    def __init__(self, num_slots: int, most: int, fixed: float | None):
        """`fixed`: the threshold, if it is set; None: it is learned."""
        self._fixed = fixed
        self._calibration = Calibration()
        self._products = np.zeros((num_slots, most), np.float32)
        self._orders = 0
        self.kept, self.passes = np.ones(most), np.ones(most)
        self._asked, self._made = np.zeros((2, num_slots), np.int32)

    def thresholds(self, odds: tuple[float, float] | None) -> tuple[float, float]:
        """For the next order (`DraftOrder.thresholds`).

        Args:
            odds: how likely a draft must be to stand, with all before it, so that judging it pays, and so
                that drafting the one behind it does; None: this order is a trial.
        """
        if self._fixed is not None:
            return self._fixed, 0.0
        self._orders += 1
        if odds is None or self._orders % _EVERY == 0:
            return 0.0, 0.0
        return self._calibration.threshold(odds[0]), self._calibration.threshold(odds[1])

    def ended(self, slots: np.ndarray, asked: np.ndarray, made: np.ndarray, products: np.ndarray) -> None:
        """Drafts of an order are there.

        Args:
            slots: int64 `[n]`; asked, made: int32 `[n]`, tokens ordered and drafted.
            products: float32 `[n, k]`, as `StepResult.products`.
        """
        self._asked[slots], self._made[slots] = asked, made
        self._products[slots, : products.shape[1]] = products
        for place in range(int(asked.max(initial=0))):
            long = asked > place
            weight = min(1.0, _FADE * int(long.sum()))
            self.kept[place] += weight * (float((made[long] > place).mean()) - self.kept[place])
            ran = float((products[long, place] > 0).mean())
            self.passes[place] += weight * (ran - self.passes[place])

    def judged(self, slots: np.ndarray, drafted: np.ndarray, stood: np.ndarray) -> np.ndarray:
        """Drafts were judged: int32 `[n]` each, how many there were, and how many leading ones stood.

        Returns:
            int32 `[n]`, as how many they count for what drafts of a length yield: as many as were ordered
            where confidence ended them.
        """
        places = np.arange(self._products.shape[1])
        known = places < drafted[:, None]
        self._calibration.add(self._products[slots][known], (places < stood[:, None])[known])
        return np.where(drafted == self._made[slots], self._asked[slots], drafted)
