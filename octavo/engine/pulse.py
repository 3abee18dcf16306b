"""Where an engine core's loop is, for whoever asks beside it: a hung one is told from a busy one."""

from __future__ import annotations

from octavo.messages import Pulse
from octavo.step_messages import StepPlan

Kind = tuple[object, ...]


class LoopPulse:
    """What the loop is doing. Written on the loop's thread, read on any other (`pulse`).

    Work is of a kind: a step's is its size, to a power of two, and what else it computes. The first of a kind
    may compile kernels and record graphs, and takes as long as that takes.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._idle = True
        self._longest: dict[Kind, float] = {}  # seconds; the first of a kind counts until there is a second
        self._again: set[Kind] = set()  # kinds that have come more than once
        # Of the last two steps, since one may be launched while the other runs.
        self._kinds: tuple[Kind, Kind] | tuple[Kind] | tuple[()] = ()
        self._chore = False

    def rest(self) -> None:
        """The loop waits for a message."""
        self._idle = True

    def go_round(self) -> None:
        """The loop begins another turn."""
        self._turn += 1
        self._idle = self._chore = False

    def chore(self) -> None:
        """What comes in this turn is no step, and may take long."""
        self._chore = True

    def launch(self, kind: Kind) -> None:
        """A step of a kind begins."""
        self._kinds = (self._kinds[-1], kind) if self._kinds else (kind,)

    def finish(self, kind: Kind, seconds: float) -> None:
        """A step of a kind is through."""
        if kind in self._again:
            seconds = max(seconds, self._longest[kind])
        elif kind in self._longest:
            self._again.add(kind)
        self._longest[kind] = seconds

    def pulse(self) -> Pulse:
        """Where the loop is now."""
        kinds = self._kinds
        first = self._chore or any(kind not in self._longest for kind in kinds)
        longest = max((self._longest.get(kind, 0.0) for kind in kinds), default=0.0)
        return Pulse(self._turn, self._idle, first, longest)


def step_kind(plan: StepPlan) -> Kind:
    """What decides which kernels a step needs, roughly."""
    return (
        plan.total_rows.bit_length(),
        len(plan.slots).bit_length(),
        plan.masked is not None,
        plan.num_drafts is not None,
        plan.propose is not None,
        plan.prompt_logprobs is not None,
        plan.shared_blocks > 0,
        bool(plan.copies),
    )
