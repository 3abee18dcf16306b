"""The bubble of a pipeline: the share of its stages' time in which they waited for something to compute."""

from __future__ import annotations

import collections

_RECENT = 64  # steps


class PipelineClock:
    """Adds up the time in which steps were under way, and that in which stages computed.

    Attributes:
        stage_seconds: that the stages have computed, all of them together.
        total_seconds: that they could have: while any step was under way, for every stage.
    """

    def __init__(self, stages: int):
        self._stages = stages
        self.stage_seconds = 0.0
        self.total_seconds = 0.0
        self._since: float | None = None  # while steps are under way: until when their time was counted
        self._recent: collections.deque[tuple[float, float]] = collections.deque(maxlen=_RECENT)

    def launched(self, now: float) -> None:
        """A step begins (`time.perf_counter` seconds, as everywhere here)."""
        if self._since is None:
            self._since = now

    def ended(self, now: float, computed: float, more: bool) -> None:
        """The oldest step has ended.

        Args:
            computed: seconds that the stages computed for it, all together.
            more: whether others are under way.
        """
        passed = 0.0 if self._since is None else (now - self._since) * self._stages
        self._since = now if more else None
        self.stage_seconds += computed
        self.total_seconds += passed
        self._recent.append((computed, passed))

    def failed(self) -> None:
        """The oldest step has failed, and with it those behind it."""
        self._since = None

    @property
    def bubble(self) -> float:
        """Of the last steps, the share of the stages' time in which they did not compute, 0 to 1."""
        total = sum(passed for _, passed in self._recent)
        return max(0.0, 1 - sum(computed for computed, _ in self._recent) / total) if total else 0.0
