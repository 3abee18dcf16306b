"""How many tokens to draft: as many as make tokens come fastest, as measured; none where none pay."""

from __future__ import annotations

import numpy as np

from octavo.speculative.acceptance import Acceptance
from octavo.speculative.step_times import StepTimes

_SHARE = 0.004  # of all time that may go into finding out whether drafts pay
_MOST_CREDIT = 4.0  # steps' time; what a long time without trials saves up
_FADE = 0.1
_FORGET = 1 / 256  # of what proposing takes, a step
_OUTLIER = 3.0  # a step that took so many times the usual time was held up: it counts as this
_NEARLY, _MOST_DEBT = 0.9, 2.0  # of the most credit: what suffices for any trial, and what one costs at most


class Adaptation:
    """Weighs the tokens that drafts are expected to yield against the time that their rows take.

    Where drafts don't pay, finding that out again costs time: proposals that nobody judges, and rows that are
    judged to learn whether it is true yet. Four thousandths of all time are set aside for that; while they
    are used up, nothing is proposed.

    Attributes:
        acceptance: what the verifier said.
        times: of steps by their rows.
    """

    def __init__(self, num_slots: int, num_kinds: int, most: int):
        self.acceptance = Acceptance(num_slots, num_kinds, most)
        self.times = StepTimes()
        self._credit = 0.0  # seconds
        self._step = 0.0  # seconds of a step, of late
        self._proposing = 0.0  # the same of making proposals and choosing among them
        self._pays = False  # what was chosen last

    @property
    def awake(self) -> bool:
        """Whether drafts should be proposed for the next step."""
        return self._credit >= 0

    def spend(self, seconds: float) -> bool:
        """Whether a trial that takes so long may be made; it is counted then.

        One that seems to take longer than the most that is saved up is made when that is there, and paid off
        afterwards, within reason: what a trial takes is only known by trials, and a first one may have been
        slow for reasons of its own.
        """
        most = _MOST_CREDIT * self._step
        if self._credit < min(seconds, _NEARLY * most):
            return False
        self._credit -= min(seconds, _MOST_DEBT * most)
        return True

    def passed(self, seconds: float) -> None:
        """A step has taken so long, drafts or not."""
        if not self._step:  # enough to begin with
            self._step = seconds
            self._credit += _MOST_CREDIT / 2 * seconds
        self._step += _FADE * (min(seconds, _OUTLIER * self._step) - self._step)
        self._credit = min(_MOST_CREDIT * self._step, self._credit + _SHARE * seconds)
        # What seems too dear is not asked for, and so would never be measured again.
        self._proposing *= 1 - _FORGET

    def looked(self, seconds: float) -> None:
        """Looking for drafts, of which none are judged yet, took so long."""
        self._spent(seconds)

    def proposed(self, seconds: float) -> None:
        """Making proposals for a step and choosing among them (if there were any) delayed it for so long."""
        seconds = self._usual(seconds)
        self._proposing += _FADE * (seconds - self._proposing)
        if not self._pays:
            self._spent(seconds)
        self._pays = False

    def _usual(self, seconds: float) -> float:
        """So long, or what a step may take: whatever held the host up longer was something else."""
        return min(seconds, _OUTLIER * self._step) if self._step else seconds

    def _spent(self, seconds: float) -> None:
        least = -_MOST_DEBT * _MOST_CREDIT * self._step
        self._credit = max(min(self._credit, least), self._credit - self._usual(seconds))

    def promises(self, odds: np.ndarray, rows: int, most: int) -> bool:
        """Whether any such drafts would be judged, what proposing them takes included; arguments as
        `choose`'s."""
        _, best, extra = self._weigh(odds, rows, most)
        return best > 0 or (len(extra) > 1 and float(extra[1]) + self._proposing < self._credit)

    def choose(self, odds: np.ndarray, rows: int, most: int) -> np.ndarray:
        """How many drafts of each request to judge, int64 `[n]`.

        Args:
            odds: float64 `[n, k]`, that a draft stands with all before it; 0 where there is none.
            rows: of the step without drafts.
            most: drafts in all.
        """
        order, best, extra = self._weigh(odds, rows, most)
        self._pays = best > 0
        if not best and len(extra):
            # Measured anew from time to time, however it looks: what is known may be old.
            best = int(np.searchsorted(extra, self._credit, side="right")) - 1
            self._credit -= float(extra[best])
        return np.bincount(order[:best] // odds.shape[1], minlength=len(odds))

    def _weigh(self, odds: np.ndarray, rows: int, most: int) -> tuple[np.ndarray, int, np.ndarray]:
        """Drafts (places in flattened `odds`), the likeliest first; of how many the rate is best, 0 if of
        none; and seconds that 0, 1, … of them add to a step, empty where nothing is known."""
        # Of equally likely ones the first requests' come first, and of these each one's first drafts.
        order = np.argsort(-odds, axis=None, kind="stable")
        order = order[: min(most, int(np.count_nonzero(odds)))]
        count = len(order)
        seconds = self.times.curve(rows, count + 1) if count and self.times.knows(rows) else None
        if seconds is None or len(seconds) <= count:
            return order, 0, np.zeros(0)
        tokens = rows + np.concatenate(([0.0], np.cumsum(odds.ravel()[order])))
        rates = tokens / (seconds + self._proposing)
        best = int(rates.argmax())
        if rates[best] <= tokens[0] / seconds[0]:
            best = 0
        return order, best, seconds - seconds[0]
