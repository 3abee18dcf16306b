"""Tokens per second, from counters that are read now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LEAST_SECONDS = 10.0
_MOST_READINGS = 1000  # of readers that never leave a window of time between two readings


class Throughput:
    """Rates since the reading that is at least `LEAST_SECONDS` old (the first one until there is such a one).

    Nothing runs between readings, and several readers don't shorten each other's windows.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._readings: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=_MOST_READINGS)

    def rates(self, *counters: int) -> tuple[float, ...]:
        """Take a reading; each counter's rate per second. 0 at the first, and where counters began anew."""
        now, readings = self._clock(), self._readings
        if readings and any(new < old for new, old in zip(counters, readings[-1][1], strict=True)):
            readings.clear()  # another engine counts
        while len(readings) > 1 and now - readings[1][0] >= LEAST_SECONDS:
            readings.popleft()
        readings.append((now, counters))
        since, before = readings[0]
        seconds = now - since
        if seconds <= 0:
            return (0.0,) * len(counters)
        return tuple((new - old) / seconds for new, old in zip(counters, before, strict=True))
