"""How often an engine that has ended is started again."""

from __future__ import annotations

import collections
import time

MOST_RESTARTS = 3
WINDOW = 600.0
"""Seconds in which there are at most `MOST_RESTARTS`: what ends an engine so often will do so again."""


class RestartBudget:
    """Counts restarts within the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._times: collections.deque[float] = collections.deque()

    def take(self) -> bool:
        """Whether the engine may be started once more, which is counted."""
        now = time.monotonic()
        while self._times and now - self._times[0] > WINDOW:
            self._times.popleft()
        if len(self._times) >= MOST_RESTARTS:
            return False
        self._times.append(now)
        return True
