"""Notices an engine core that has hung: its process stands still, or its loop doesn't go round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.messages import Pulse

FIRST_TIMES = 10
"""So many times as long may take what the loop does for the first time: it may compile."""
LONGEST_TIMES = 10
"""So many times as long as ever before may take what it has done before, beside the timeout."""


@dataclass(frozen=True)
class Watch:
    """What a core is watched for.

    Attributes:
        seconds: of no progress, after which it counts as hung.
        is_awaited: whether anybody waits for it; nothing is asked of an idle one.
    """

    seconds: float
    is_awaited: Callable[[], bool]


class Watchdog:
    """Asks a core for its pulse, on a thread of its own, while anybody waits for the core.

    Time in which this thread itself stood still (a machine that was suspended, a container that was paused)
    doesn't count.

    Args:
        ask: sends `AskPulse`; its answer comes by `tell`.
        on_hung: is called once, with what was seen, as the last thing.
    """

    def __init__(self, watch: Watch, ask: Callable[[], None], on_hung: Callable[[str], None]):
        self._watch = watch
        self._ask = ask
        self._on_hung = on_hung
        self._interval = min(max(watch.seconds / 20, 0.02), 5.0)
        self._stopped = threading.Event()
        self._pulse: Pulse | None = None  # the last one
        self._asked = False  # and not answered
        threading.Thread(target=self._run, name="octavo-watchdog", daemon=True).start()

    def tell(self, pulse: Pulse) -> None:
        """The core has answered."""
        self._pulse = pulse
        self._asked = False

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _run(self) -> None:
        silent = still = 0.0  # seconds without an answer, and in the same turn
        turn, last = -1, time.monotonic()
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self._interval), now
            if not self._watch.is_awaited():
                silent = still = 0.0
                turn = -1
                continue
            pulse = self._pulse
            if self._asked:
                silent += passed
            else:
                silent = 0.0
                moved = pulse is None or pulse.idle or pulse.turn != turn
                still = 0.0 if moved else still + passed
                turn = -1 if pulse is None else pulse.turn
                self._asked = True
                self._ask()
            most = self._allowed(pulse)
            if max(silent, still) > most:
                what = "given no sign of life" if silent > most else "been in one step"
                self._on_hung(f"it has {what} for {max(silent, still):.3g} s")
                return

    def _allowed(self, pulse: Pulse | None) -> float:
        seconds = self._watch.seconds
        if pulse is None or pulse.idle:
            return seconds
        return seconds * (FIRST_TIMES if pulse.first else 1) + LONGEST_TIMES * pulse.longest
