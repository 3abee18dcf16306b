"""How long a step takes by its number of rows: measured, and guessed between and beyond."""

from __future__ import annotations

import numpy as np

_SIZES = np.array([
    *range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768,
    1024, 2048, 4096, 8192,
])  # fmt: skip
_FADE = 0.1  # weight of a new time
_FIRST = 4  # of so many first times of a size the shortest counts: among them are records and hiccups
_OUTLIER = 1.5  # a time so many times the known one is a hiccup: it counts as this
_PRIOR_SLOPE = 0.02  # of one row's time that another row is taken to cost, until that was measured


def mean_of_late(old: float, seconds: float, count: int) -> float:
    """A mean time, with the last of so many `count` taken in; NaN for `old` before the first."""
    if count <= _FIRST:
        return float(np.fmin(old, seconds))
    return old + _FADE * (min(seconds, _OUTLIER * old) - old)


class StepTimes:
    """Mean time of late of steps of so many rows, in which no prompt is computed.

    Sizes that no step had are guessed from those around; beyond the measured ones, and while only one is
    known, by a slope that errs on the side of trying.
    """

    def __init__(self) -> None:
        self._mean = np.full(len(_SIZES), np.nan)
        self._count = np.zeros(len(_SIZES), np.int64)
        self._curve: tuple[np.ndarray, np.ndarray] | None = None  # known rows and seconds

    def add(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        place = min(int(np.searchsorted(_SIZES, rows)), len(_SIZES) - 1)
        self._count[place] += 1
        self._mean[place] = mean_of_late(float(self._mean[place]), seconds, int(self._count[place]))
        self._curve = None

    def knows(self, rows: int) -> bool:
        """Whether steps of so many rows, or of fewer, have been measured more than once."""
        return bool((self._count[: int(np.searchsorted(_SIZES, rows, side="right"))] > 1).any())

    def curve(self, first: int, count: int) -> np.ndarray | None:
        """Seconds of steps of `first`, `first + 1`, … rows, float64 `[count]`; None: nothing is known yet.

        It never falls: a larger step that seems quicker is noise. Beyond the largest known step it rises as
        on the whole, or as from `first` on, whichever is less: the first rows of a step may cost more than
        the many after them.
        """
        if self._curve is None:
            # The first step of a size may have been slow because it was the first: a kernel was compiled, or
            # the step recorded.
            known = np.flatnonzero(self._count > 1)
            if not len(known):
                known = np.flatnonzero(self._count)
            if not len(known):
                return None
            self._curve = _SIZES[known].astype(float), np.maximum.accumulate(self._mean[known])
        sizes, times = self._curve
        slope = _PRIOR_SLOPE * times[0] / sizes[0]
        if len(sizes) > 1:
            slope = _slope(sizes, times)
        above = sizes >= first
        last = float(_SIZES[-1])
        if sizes[-1] < last:
            rise = min(slope, _slope(sizes[above], times[above])) if above.sum() > 1 else slope
            sizes, times = np.append(sizes, last), np.append(times, times[-1] + rise * (last - sizes[-1]))
        if sizes[0] > 1:
            least = max(times[0] - slope * (sizes[0] - 1), 0.5 * times[0])
            sizes, times = np.insert(sizes, 0, 1.0), np.insert(times, 0, least)
        end = min(first + count, int(_SIZES[-1]) + 1)
        return np.interp(np.arange(first, end), sizes, times)


def _slope(sizes: np.ndarray, times: np.ndarray) -> float:
    return float((times[-1] - times[0]) / (sizes[-1] - sizes[0]))
