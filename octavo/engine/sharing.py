"""How a step's rows are divided among prompts under way, and between these and requests that wait."""

from __future__ import annotations

import numpy as np


def share(
    rows: np.ndarray, need: np.ndarray, long: np.ndarray, budget: int, most: int, waiting: bool, odd: int
) -> int:
    """Divide the budget among prompts under way and those behind them; returns what was given.

    The first in order gets half when another one wants rows, the others (nearest to their end
    first) a half of the rest when requests wait. So no prompt, however long, holds back a short
    one behind it, and none is held back for ever.

    Args:
        rows: int32 `[n]`, rows of each running request; changed.
        need: int32 `[n]`, tokens of each that could be computed.
        long: integer `[k]`, the prompts, in order.
        budget: rows that may be given.
        most: rows of a request at most.
        waiting: whether requests wait that could begin.
        odd: 0 or 1, in turn: which side odd tokens fall to.
    """
    half = (budget + odd) // 2
    given = give(rows, need, long[:1], half if waiting or len(long) > 1 else budget, most)
    others = long[1:][np.argsort(need[long[1:]], kind="stable")]
    rest = budget - given
    return given + give(rows, need, others, (rest + odd) // 2 if waiting else rest, most)


def give(rows: np.ndarray, need: np.ndarray, long: np.ndarray, budget: int, most: int) -> int:
    """Add rows to the prompts at indexes `long`, in order; returns how many. Arguments as `share`."""
    given = 0
    for i in long:
        if given >= budget:
            break
        count = min(int(need[i]) - int(rows[i]), budget - given, most - int(rows[i]))
        rows[i] += count
        given += count
    return given
