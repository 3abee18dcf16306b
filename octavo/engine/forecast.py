"""How much of the pool the running requests will need, so that few have to be preempted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.kv.capacity import most_blocks
from octavo.kv.format import KVGroup

_REMEMBERED = 256  # finished requests that say how long others become
# Before any has finished: some end early, some at their limit.
_PRIOR = (0.25, 0.5, 0.75, 1.0)


class Forecast:
    """Predicts the most blocks that requests hold together until their ends (as tokasaurus does).

    A request's end is its token limit where nothing else can end it. Others are expected to use as large a
    part of their limit as those did, of late, that had gone on at least as long.
    """

    def __init__(self, groups: Sequence[KVGroup]):
        self._block_size = groups[0].format.block_size
        self._num_full = sum(group.sliding_window is None for group in groups)
        self._windows = [most_blocks(g, 1 << 30) for g in groups if g.sliding_window is not None]
        self._observed = list(_PRIOR)
        self._oldest = 0
        self._sort()

    def observe(self, used: int, limit: int) -> None:
        """A request that could have ended early is done: it used so many of at most so many output tokens."""
        share = used / limit
        if len(self._observed) < _REMEMBERED:
            self._observed.append(share)
        else:
            self._observed[self._oldest] = share
            self._oldest = (self._oldest + 1) % _REMEMBERED
        self._stale = True

    def _sort(self) -> None:
        self._shares = np.sort(self._observed)
        # The mean of the shares from each place on; past the last one, all of the limit.
        sums = np.cumsum(self._shares[::-1])[::-1]
        self._means = np.append(sums / np.arange(len(sums), 0, -1), 1.0)
        self._stale = False

    def remaining(self, used: np.ndarray, limit: np.ndarray, certain: np.ndarray) -> np.ndarray:
        """Output tokens that requests are expected to yield yet, float64 `[n]`.

        Args:
            used: output tokens that they have yielded, `[n]`.
            limit: at most so many.
            certain: bool `[n]`, those that nothing ends before their limit.
        """
        if self._stale:
            self._sort()
        share = self._means[np.searchsorted(self._shares, used / limit)]
        ends = np.where(certain, limit, np.minimum(limit, np.maximum(share * limit, used + 1)))
        return ends - used

    def peak(self, num_used: int, tokens: np.ndarray, remaining: np.ndarray) -> float:
        """The most blocks in use at once if requests go on side by side, one token a step, to their ends.

        Args:
            num_used: blocks in use now, by these requests.
            tokens: of each, `[n]`, n >= 1.
            remaining: tokens that each will add.
        """
        size, full = self._block_size, self._num_full
        now = -(-tokens // size)
        own = (full * now).astype(np.float64)
        later = np.zeros(len(tokens))  # what windows will take yet: early, so as if at once
        ends = (tokens + remaining) / size
        for most in self._windows:
            held = np.minimum(now, most)
            own += held
            later += np.minimum(np.ceil(ends), most) - held
        # Shared blocks are counted for each sharer: all together own what is in use.
        own *= min(1.0, num_used / own.sum())
        order = np.argsort(remaining)
        steps = remaining[order]
        left = np.arange(len(tokens), 0, -1)  # requests that run until then, the one that ends included
        gone = np.concatenate(([0.0], np.cumsum(own[order])[:-1]))
        growth = full * left * steps / size + np.cumsum(later[order][::-1])[::-1]
        return float(num_used + (growth - gone).max())
