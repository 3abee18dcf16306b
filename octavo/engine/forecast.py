"""How much of the pool the running requests will need, so that few have to be preempted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Facts(NamedTuple):
    """What is known of n requests.

    Attributes:
        tokens: integer `[n]`, of each, known or being sampled.
        used: integer `[n]`, output tokens of these.
        limit: integer `[n]`, output tokens at most.
        certain: bool `[n]`, those that nothing ends before that.
        pace, spread: float64 `[n]`, tokens that a step yields, and the variance of that.
    """

    tokens: np.ndarray
    used: np.ndarray
    limit: np.ndarray
    certain: np.ndarray
    pace: np.ndarray
    spread: np.ndarray


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

    def longest(self, facts: Facts) -> float:
        """Steps that requests go on for yet, at most, where that is likely."""
        shares = self._shares()
        used, limit = facts.used, facts.limit
        ends = np.where(facts.certain | (used >= shares[-1] * limit), limit, shares[-1] * limit)
        return float(((ends - used) / facts.pace).max())

    def alive(self, times: np.ndarray, facts: Facts) -> np.ndarray:
        """How likely each request goes on for so many steps more (`times`, `[k]`), float64 `[n, k]`."""
        shares = self._shares()
        count = len(shares)
        used, limit = facts.used, facts.limit
        left = count - np.searchsorted(shares, used / limit)
        more = facts.pace[:, None] * times
        later = count - np.searchsorted(shares, (used[:, None] + more) / limit[:, None])
        unknown = left == 0  # longer already than any other: to the limit
        odds = later / np.maximum(left, 1)[:, None]
        ends = facts.certain | unknown
        short = (limit - used)[ends, None] - more[ends]
        odds[ends] = _not_there(short, facts.spread[ends, None] * times)
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


def _not_there(short: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """How likely sums are below a bound that their means are so far below; the normal distribution's, by its
    logistic approximation."""
    sure = short > 0
    if not variance.any():
        return sure
    deviations = np.clip(short / np.sqrt(np.maximum(variance, 1e-9)), -20.0, 20.0)
    return np.where(variance > 0, 1 / (1 + np.exp(-1.702 * deviations)), sure)


class Demand:
    """The blocks that a set of requests is expected to hold from now on, by steps."""

    def __init__(self, forecast: Forecast, horizon: float):
        """`horizon`: steps from now up to which use is predicted."""
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

    def part(self, facts: Facts) -> Part:
        """What requests hold."""
        forecast, size, times = self._forecast, self._forecast.block_size, self._times
        alive = forecast.alive(times, facts)
        now = -(-facts.tokens // size)
        more = np.minimum(facts.pace[:, None] * times, (facts.limit - facts.used)[:, None])
        ends = np.ceil((facts.tokens[:, None] + more) / size)
        own = (forecast.num_full * now).astype(np.float64)
        growth = forecast.num_full * (ends - now[:, None])
        for most in forecast.windows:
            held = np.minimum(now, most)
            own += held
            growth += np.minimum(ends, most) - held[:, None]
        then, per_token = own[:, None] + growth, forecast.num_full / size
        variance = alive * (1 - alive) * then**2 + alive * per_token**2 * facts.spread[:, None] * times
        halfway = alive * per_token * facts.pace[:, None] * times[0]
        sums = (own[:, None] * alive, growth * alive, variance, halfway)
        return Part(float(own.sum()), np.stack([x.sum(0) for x in sums]))
