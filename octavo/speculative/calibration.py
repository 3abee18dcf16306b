"""What a draft's confidence is worth: how often drafts stood, by the product of their probabilities."""

from __future__ import annotations

import numpy as np

_EDGES = np.array([0.0, 0.01, 0.03, 0.06, *np.arange(0.1, 0.95, 0.05), 0.97, 0.99])
_MEMORY = 400.0  # drafts that a rate remembers
_PRIOR_WEIGHT = 8.0  # of the belief that a draft is right as often as it is sure


class Calibration:
    """Counts, with a fading memory, drafts that stood together with all before them, by bins of the product.

    Until it was measured, a draft is taken to be right as often as it says.
    """

    def __init__(self) -> None:
        middle = (_EDGES + np.append(_EDGES[1:], 1.0)) / 2
        self._judged = np.full(len(_EDGES), _PRIOR_WEIGHT)
        self._stood = _PRIOR_WEIGHT * middle

    def add(self, products: np.ndarray, stood: np.ndarray) -> None:
        """Drafts of such products (float `[n]`) were judged; bool `[n]`: stood, and all before them."""
        bins = np.searchsorted(_EDGES, products, side="right") - 1
        judged = np.bincount(bins, minlength=len(_EDGES))
        good = np.bincount(bins, stood, minlength=len(_EDGES))
        fade = np.minimum(1.0, np.maximum(0.0, _MEMORY - judged) / self._judged)
        self._judged, self._stood = self._judged * fade + judged, self._stood * fade + good

    def threshold(self, odds: float) -> float:
        """The least product from which on drafts stand at least so often; above 1 if none do."""
        rates = np.maximum.accumulate(self._stood / self._judged)
        place = int(np.searchsorted(rates, odds, side="left"))
        return float(_EDGES[place]) if place < len(_EDGES) else 2.0
