"""What is likely to follow, by how often what has followed the same tokens before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

UNKNOWN = -1
"""Stands for what is before or behind a text; no token."""


class Draft(NamedTuple):
    """A continuation.

    Attributes:
        tokens: int32 `[k]`, k >= 0.
        score: sum of the tokens' probabilities, each that of all tokens up to it: how many of them are
            expected to stand.
        matched: tokens that were found again.
    """

    tokens: np.ndarray
    score: float
    matched: int


NO_DRAFT = Draft(np.zeros(0, np.int32), 0.0, 0)


def likeliest(rows: np.ndarray, least: float) -> tuple[np.ndarray, float]:
    """The tokens that followed most often, one after another, and their score (see `Draft`).

    Of tokens that are equally frequent the one that followed last is taken. Places of which no more is known
    count no longer.

    Args:
        rows: int32 `[n, k]`, n >= 1: what followed at each place, the newest last; from an `UNKNOWN` on
            nothing is known.
        least: the draft ends before a token whose probability, together with all before it, is lower.
    """
    draft = np.empty(rows.shape[1], np.int32)
    done, score, odds = 0, 0.0, 1.0
    while done < len(draft):
        # As long as all places at which anything is known agree, many tokens are taken at once.
        one = rows[0]
        if len(rows) == 1:
            alike = one != UNKNOWN
        else:
            alike = ((rows == one) | (rows == UNKNOWN)).all(axis=0) & (one != UNKNOWN)
        run = int(alike.argmin()) if not alike.all() else len(alike)
        if run:
            draft[done : done + run] = one[:run]
            done += run
            score += odds * run
            rows = rows[:, run:]
            continue
        first = rows[:, 0]
        counts: dict[int, int] = {}
        known = first.tolist()
        for token in known:
            counts[token] = counts.get(token, 0) + 1
        total = len(known) - counts.pop(UNKNOWN, 0)
        if not total:
            break
        most = max(counts.values())
        token = next(t for t in reversed(known) if counts.get(t) == most)
        odds *= most / total
        if odds < least:
            break
        draft[done] = token
        done += 1
        score += odds
        rows = rows[first == token, 1:]
    return draft[:done], score
