"""How much of the pool the running requests will need, so that few have to be preempted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.kv.capacity import most_blocks
from octavo.kv.format import KVGroup

_REMEMBERED = 256  # finished requests that say how long others become
# Until some have finished: requests end anywhere before their limit.
_PRIOR = np.linspace(0.05, 1.0, 20)
_ENOUGH = 32  # finished requests that outweigh that
_POINTS = 32  # in time, at which use is predicted
_MOST_CAUTION = 3.0  # standard deviations
_STEP_OF_CAUTION, _EASE = 0.5, 0.98


class Forecast:
    """Predicts how long requests go on, from how long others did of late; knows how far to trust that.

    A request ends at its token limit where nothing else can end it. Others use as large a part of their
    limit as those of late that had gone on at least as long.

    Attributes:
        caution: standard deviations beyond the expected use of blocks that must fit (and, up to 1, how much
            of what use may grow by between two points in time). Each preemption adds to it, each end of a
            request takes a little away.
    """

    def __init__(self, groups: Sequence[KVGroup]):
        self.block_size = groups[0].format.block_size
        self.num_full = sum(group.sliding_window is None for group in groups)
        self.windows = [most_blocks(g, 1 << 30) for g in groups if g.sliding_window is not None]
        self.caution = 0.0
        self._observed: list[float] = []
        self._oldest = 0
        self._sorted: np.ndarray | None = _PRIOR

    def ended(self, used: int, limit: int, certain: bool) -> None:
        """A request is done; it used so many of at most so many output tokens (`certain`: it had to)."""
        self.caution *= _EASE
        if certain:
            return
        if len(self._observed) < _REMEMBERED:
            self._observed.append(used / limit)
        else:
            self._observed[self._oldest] = used / limit
            self._oldest = (self._oldest + 1) % _REMEMBERED
        self._sorted = None

    def preempted(self) -> None:
        """A request had to leave: less room than was foreseen."""
        self.caution = min(_MOST_CAUTION, self.caution + _STEP_OF_CAUTION)

    def longest(self, used: np.ndarray, limit: np.ndarray, certain: np.ndarray) -> float:
        """Tokens that requests will yield yet, at most, where that is likely; arguments as `Demand.part`."""
        shares = self._shares()
        ends = np.where(certain | (used >= shares[-1] * limit), limit, shares[-1] * limit)
        return float((ends - used).max())

    def alive(
        self, times: np.ndarray, used: np.ndarray, limit: np.ndarray, certain: np.ndarray
    ) -> np.ndarray:
        """How likely each request goes on for so many tokens more, float64 `[n, k]`.

        Args:
            times: tokens from now, `[k]`.
            used, limit, certain: as in `Demand.part`.
        """
        shares = self._shares()
        count = len(shares)
        left = count - np.searchsorted(shares, used / limit)
        later = count - np.searchsorted(shares, (used[:, None] + times) / limit[:, None])
        unknown = left == 0  # longer already than any other: to the limit
        odds = later / np.maximum(left, 1)[:, None]
        ends = certain | unknown
        odds[ends] = times < (limit - used)[ends, None]
        return odds

    def _shares(self) -> np.ndarray:
        if self._sorted is None:
            prior = _PRIOR if len(self._observed) < _ENOUGH else ()
            self._sorted = np.sort([*self._observed, *prior])
        return self._sorted


@dataclass(frozen=True)
class Part:
    """What some requests hold: blocks now, and by time those of them that are kept, what they have grown by,
    the variance of both together, and what they grow by from a point in time halfway to the next, float64
    `[4, k]`."""

    own: float
    by_time: np.ndarray


class Demand:
    """The blocks that a set of requests is expected to hold from now on, one token each a step."""

    def __init__(self, forecast: Forecast, horizon: float):
        """`horizon`: tokens from now up to which use is predicted."""
        self.horizon = horizon
        self._forecast = forecast
        self._times = (np.arange(_POINTS) + 0.5) * (max(horizon, 1.0) / _POINTS)
        self._own = 0.0
        self._by_time = np.zeros((4, _POINTS))

    def add(self, part: Part) -> None:
        """Count requests in."""
        self._own += part.own
        self._by_time += part.by_time

    def peak(self, num_used: int, part: Part) -> float:
        """The most blocks that will be in use at once if the requests of `part` are added.

        Args:
            num_used: blocks in use then. Blocks that requests share make this fewer than each one's together.
        """
        kept, grown, variance, between = self._by_time + part.by_time
        own = self._own + part.own
        expected = num_used + min(1.0, num_used / own) * (kept - own) + grown
        caution = self._forecast.caution
        margin = caution * np.sqrt(variance) + min(1.0, caution) * between
        return float(max(num_used, (expected + margin).max()))

    def part(self, tokens: np.ndarray, used: np.ndarray, limit: np.ndarray, certain: np.ndarray) -> Part:
        """What requests hold.

        Args:
            tokens: integer `[n]`, of each request, known or being sampled.
            used: of these, output tokens.
            limit: output tokens at most.
            certain: bool `[n]`, those that nothing ends before that.
        """
        forecast, size = self._forecast, self._forecast.block_size
        alive = forecast.alive(self._times, used, limit, certain)
        now = -(-tokens // size)
        more = np.minimum(self._times, (limit - used)[:, None])
        own = (forecast.num_full * now).astype(np.float64)
        growth = forecast.num_full * more / size
        for most in forecast.windows:
            held = np.minimum(now, most)
            own += held
            growth += np.minimum(np.ceil((tokens[:, None] + more) / size), most) - held[:, None]
        then = own[:, None] + growth
        halfway = forecast.num_full * self._times[0] / size
        variance = (alive * (1 - alive) * then**2).sum(0)
        sums = ((own[:, None] * alive).sum(0), (growth * alive).sum(0), variance, alive.sum(0) * halfway)
        return Part(float(own.sum()), np.stack(sums))
