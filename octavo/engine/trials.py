"""Which request made a step fail: its requests are tried again in ever smaller groups."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

import numpy as np

from octavo.engine.loading import LoadingRequests
from octavo.engine.request import Request
from octavo.engine.slots import Slots
from octavo.engine.waiting import WaitingQueue
from octavo.step_messages import StepPlan


class TrialQueue:
    """The waiting requests, of which only those under trial are shown while there are any.

    Looks like a `WaitingQueue`. A group's requests are under trial until each has passed the rows with which
    it was in a failed step; the next group's turn comes then, and at last that of all others.
    """

    def __init__(self) -> None:
        self._usual = WaitingQueue()
        self._tried = WaitingQueue()
        # Requests and how many of their tokens must be computed to pass; the first group is under trial.
        self._groups: collections.deque[dict[Request, int]] = collections.deque()

    def __len__(self) -> int:
        return len(self._shown)

    @property
    def num_all(self) -> int:
        """Requests that wait, those that have to wait for a trial's end among them."""
        return len(self._usual) + len(self._tried)

    @property
    def group(self) -> dict[Request, int] | None:
        """The requests under trial."""
        return self._groups[0] if self._groups else None

    def push(self, request: Request) -> None:
        """Queue a request by its order."""
        self._queue_of(request).push(request)

    def ended(self, request: Request) -> None:
        """A request that waits is done."""
        self._queue_of(request).ended()

    def peek(self) -> Request:
        """The first one that may run; there must be one."""
        return self._shown.peek()

    def pop(self) -> None:
        """Take out the first one, which `peek` has shown."""
        self._shown.pop()

    def live(self) -> list[Request]:
        """Those that wait, in no order."""
        return self._usual.live() + self._tried.live()

    def replace_group(self, groups: Iterable[dict[Request, int]]) -> None:
        """Try these groups in the place of the one under trial."""
        if self._groups:
            self._groups.popleft()
        self._groups.extendleft(reversed([group for group in groups if group]))
        waiting = self.live()
        self._usual, self._tried = WaitingQueue(), WaitingQueue()
        for request in waiting:
            self.push(request)

    @property
    def _shown(self) -> WaitingQueue:
        return self._tried if self._groups else self._usual

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self._tried if self._groups and request in self._groups[0] else self._usual


class Trials:
    """Finds the requests with which steps fail, and lets all others go on as if nothing had happened.

    A step that fails tells nothing of the cause. So all running requests are taken out of their slots, as by
    preemption, and those of the failed step are run again in two halves, nobody else beside them; a half that
    fails is halved again. A request that fails alone is the cause. One that fails no more was not, or its
    failure was a passing one.
    """

    def __init__(
        self,
        slots: Slots,
        waiting: TrialQueue,
        loading: LoadingRequests,
        put_back: Callable[[Request], None],
    ):
        """`put_back` takes a request out of its slot and queues it again."""
        self._slots = slots
        self._waiting = waiting
        self._loading = loading
        self._put_back = put_back

    def fail(self, plan: StepPlan, epochs: np.ndarray) -> Request | None:
        """A step has failed, and with it all that was launched after it; its keys have been taken back.

        Args:
            epochs: int64 `[n]`, those of the plan's slots when it was made.

        Returns:
            The request that is the cause, if it was alone; it still waits in the queue.
        """
        live = self._slots.epoch[plan.slots] == epochs
        ends = (plan.start + plan.num_rows)[live].tolist()
        suspects = {self._slots.at(s): end for s, end in zip(plan.slots[live].tolist(), ends, strict=True)}
        for slot in self._slots.running.tolist():
            self._put_back(self._slots.at(slot))
        for request in self._loading.live():
            if request.num_found:  # holds blocks that a trial may need
                self._loading.give_up(request)
        others = {r: end for r, end in (self._waiting.group or {}).items() if r not in suspects}
        half = (len(suspects) + 1) // 2
        tried = list(suspects.items())
        groups = [dict(tried[:half]), dict(tried[half:]), others]
        if len(tried) == 1:
            self._waiting.replace_group([others])
            return tried[0][0]
        self._waiting.replace_group(groups)
        return None

    def passed(self, plan: StepPlan, epochs: np.ndarray) -> None:
        """A step has been taken in: requests under trial that it brought far enough make room for others."""
        group = self._waiting.group
        if group is None:
            return
        live = self._slots.epoch[plan.slots] == epochs
        ends = (plan.start + plan.num_rows)[live].tolist()
        for slot, end in zip(plan.slots[live].tolist(), ends, strict=True):
            request = self._slots.at(slot)
            if end >= group.get(request, end + 1):
                del group[request]
                self._put_back(request)

    def advance(self) -> None:
        """Begin the next trial if the last one is over."""
        while (group := self._waiting.group) is not None and all(request.done for request in group):
            self._waiting.replace_group([])
