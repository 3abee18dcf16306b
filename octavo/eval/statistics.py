"""Means and percentiles over tokens, with standard errors that mind that neighbours are alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BLOCK = 128
RESAMPLES = 200


class Blocks:
    """Tokens in blocks of neighbours, the units that are taken as independent of each other.

    Tokens of a passage are easy or hard together, so that errors computed from single tokens come out
    too small. With fewer than 2 blocks every standard error is NaN.

    Args:
        lengths: scored tokens of each window, in order; each is cut into blocks of at most `BLOCK`.
    """

    def __init__(self, lengths: Sequence[int]):
        sizes = [min(BLOCK, n - lo) for n in lengths for lo in range(0, n, BLOCK)]
        self.sizes = np.array(sizes, np.int64)
        self._starts = np.cumsum(self.sizes) - self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def mean(self, values: np.ndarray) -> tuple[float, float]:
        """The mean of float64 `[tokens]` and its standard error (of a ratio of sums over blocks)."""
        total = int(self.sizes.sum())
        mean = float(values.sum()) / total
        count = len(self)
        if count < 2:
            return mean, math.nan
        residuals = np.add.reduceat(values, self._starts) - mean * self.sizes
        return mean, math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total

    def percentile_errors(self, values: np.ndarray, percentiles: Sequence[float], seed: int) -> list[float]:
        """Standard errors of percentiles (0 to 100) of float64 `[tokens]`, by a bootstrap over blocks."""
        count = len(self)
        if count < 2:
            return [math.nan] * len(percentiles)
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        owners = np.repeat(np.arange(count), self.sizes)[order]
        shares = np.asarray(percentiles) / 100.0
        generator = np.random.default_rng(seed)
        found = np.empty((RESAMPLES, len(shares)))
        for row in found:
            weights = np.bincount(generator.integers(count, size=count), minlength=count)
            ranks = np.cumsum(weights[owners])
            row[:] = ordered[np.searchsorted(ranks, shares * ranks[-1]).clip(0, len(ordered) - 1)]
        return [float(x) for x in found.std(0, ddof=1)]


def summarize(
    figures: dict[str, np.ndarray], blocks: Blocks, percentiles: Sequence[float], seed: int
) -> dict[str, float]:
    """All figures of an evaluation by name; `X_se` is the standard error of X.

    Args:
        figures: as `octavo.eval.divergence.score` gives them, of all tokens.
        percentiles: of the divergence.
        seed: of the bootstrap.
    """
    found: dict[str, float] = {}

    def put(name: str, value: float, error: float) -> None:
        found[name], found[f"{name}_se"] = value, error

    def put_exponential(name: str, mean: float, error: float) -> None:
        put(name, exponential(mean), exponential(mean) * error)

    nll = blocks.mean(figures["nll"])
    put("nll", *nll)
    put_exponential("perplexity", *nll)
    if "kl" not in figures:
        return found
    nll = blocks.mean(figures["baseline_nll"])
    put("baseline_nll", *nll)
    put_exponential("baseline_perplexity", *nll)
    # Of each token's difference: what makes a token hard for both does not count as noise.
    difference = blocks.mean(figures["nll"] - figures["baseline_nll"])
    put("nll_difference", *difference)
    put_exponential("perplexity_ratio", *difference)
    kl = figures["kl"]
    put("kl_mean", *blocks.mean(kl))
    values = np.percentile(kl, percentiles)
    errors = blocks.percentile_errors(kl, percentiles, seed)
    for percentile, value, error in zip(percentiles, values, errors, strict=True):
        put(f"kl_p{percentile:g}", float(value), error)
    found["kl_max"] = float(kl.max())
    put("top1_agreement", *blocks.mean(figures["top1"]))
    put("top5_overlap", *blocks.mean(figures["top5"]))
    return found


def exponential(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
