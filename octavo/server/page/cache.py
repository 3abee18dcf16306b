"""An answer that many who ask at once share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class Cached:
    """Keeps an answer for `seconds` (which may be changed), so that many open pages cost as much as one.

    Invariant: at most one computation runs at a time; those that wait for it get its answer.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._lock = asyncio.Lock()
        self._answer: bytes | None = None
        self._until = 0.0

    async def get(self, compute: Callable[[], Awaitable[bytes]]) -> bytes:
        """The last answer, or a new one where it is older than the time set. Errors are not kept."""
        async with self._lock:
            if self._answer is None or time.monotonic() >= self._until:
                self._answer = None
                self._answer = await compute()
                self._until = time.monotonic() + self.seconds
            return self._answer
