"""Block copies beside the steps of a GPU: their order, and when they are through."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from octavo.kernels.block_copy import BlockCopier
from octavo.step_messages import BlockCopies

logger = logging.getLogger(__name__)


@dataclass
class _Job:
    """Copies under way. `before` is the compute stream's work that they follow; `events` tell their end."""

    copies: BlockCopies
    before: Any
    events: list[Any] = field(default_factory=list)
    out_event: Any = None
    into_event: Any = None
    submitted: bool = False
    failed: bool = False


class CopyQueue:
    """Runs `BlockCopies` on two streams of their own, one each way, since a bus carries both at once.

    All copies follow what the compute stream was given before them: what is copied out has been written by
    then, and what is copied in has no reader left. Urgent ones the compute stream waits for. Where copies
    of one way touch blocks or slots of unfinished ones of the other, they follow those; so the order of
    messages is kept wherever it shows, and nowhere else.

    Telling the driver of thousands of pieces takes milliseconds. A thread does it, so that steps are
    launched meanwhile; urgent copies are submitted by the caller, after all that were asked for before.
    """

    def __init__(self, out: BlockCopier, into: BlockCopier, device: torch.device, cuda: Any = torch.cuda):
        """`cuda` is the module that streams and events come from (tests have one of their own)."""
        self._out, self._into = out, into
        self._device = device
        self._cuda = cuda
        self._out_stream, self._into_stream = cuda.Stream(device), cuda.Stream(device)
        self._pending: list[_Job] = []
        self._waiting: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._submit_all, name="kv-copies", daemon=True)
        self._thread.start()

    def launch(self, copies: BlockCopies) -> None:
        """Begin copies; a step launched after this is ordered behind the urgent ones."""
        compute = self._cuda.current_stream(self._device)
        before = self._cuda.Event()
        before.record(compute)
        job = _Job(copies, before)
        self._pending.append(job)
        urgent_out = copies.urgent and len(copies.out_blocks) > 0
        urgent_into = copies.urgent_into and len(copies.into_blocks) > 0
        if not (urgent_out or urgent_into):
            self._waiting.put(job)
            return
        self._waiting.join()
        self._submit(job)
        urgent = [job.out_event] * urgent_out + [job.into_event] * urgent_into
        for event in job.events if job.failed else urgent:
            compute.wait_event(event)

    def poll(self) -> tuple[list[int], list[int]]:
        """Numbers of the copies that ended since the last call: those that are through, those that failed."""
        done: list[int] = []
        failed: list[int] = []
        left = []
        for job in self._pending:
            if not (job.submitted and all(event.query() for event in job.events)):
                left.append(job)
            elif job.failed:
                failed.append(job.copies.number)
            else:
                done.append(job.copies.number)
        self._pending = left
        return done, failed

    @property
    def busy(self) -> bool:
        """Whether copies are under way that `poll` has not told of."""
        return bool(self._pending)

    def close(self) -> None:
        """Wait for all copies, end the thread."""
        self._waiting.put(None)
        self._thread.join()
        for stream in (self._out_stream, self._into_stream):
            stream.synchronize()

    def _submit_all(self) -> None:
        self._cuda.set_device(self._device)
        while (job := self._waiting.get()) is not None:
            try:
                self._submit(job)
            finally:
                self._waiting.task_done()
        self._waiting.task_done()

    def _submit(self, job: _Job) -> None:
        copies = job.copies
        try:
            if len(copies.out_blocks):
                others = [j.into_event for j in self._earlier(job) if _touches_into(copies, j.copies)]
                with self._cuda.stream(self._out_stream):
                    self._follow(self._out_stream, job, others)
                    self._out.out(copies.out_blocks, copies.out_slots)
                    job.out_event = self._record(self._out_stream, job)
            if len(copies.into_blocks):
                others = [j.out_event for j in [*self._earlier(job), job] if _touches_out(copies, j.copies)]
                with self._cuda.stream(self._into_stream):
                    self._follow(self._into_stream, job, others)
                    self._into.into(copies.into_slots, copies.into_blocks)
                    job.into_event = self._record(self._into_stream, job)
        except Exception:
            logger.exception("KV blocks could not be copied (%d)", copies.number)
            job.failed = True
            # What was submitted of it must be through before anybody takes the blocks for free.
            for stream in (self._out_stream, self._into_stream):
                self._record(stream, job)
        job.submitted = True

    def _earlier(self, job: _Job) -> list[_Job]:
        """Unfinished jobs before one; `poll` may take others out meanwhile."""
        found = []
        for other in list(self._pending):
            if other is job:
                break
            found.append(other)
        return found

    def _follow(self, stream: Any, job: _Job, others: list[Any]) -> None:
        stream.wait_event(job.before)
        for event in others:
            if event is not None:
                stream.wait_event(event)

    def _record(self, stream: Any, job: _Job) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        job.events.append(event)
        return event


def _common(a: np.ndarray, b: np.ndarray) -> bool:
    return len(a) > 0 and len(b) > 0 and bool(np.isin(a, b).any())


def _touches_into(ours: BlockCopies, theirs: BlockCopies) -> bool:
    """Whether copies out read or overwrite what other copies in write or read."""
    return _common(ours.out_blocks, theirs.into_blocks) or _common(ours.out_slots, theirs.into_slots)


def _touches_out(ours: BlockCopies, theirs: BlockCopies) -> bool:
    """Whether copies in overwrite or read what other copies out read or write."""
    return _common(ours.into_blocks, theirs.out_blocks) or _common(ours.into_slots, theirs.out_slots)
