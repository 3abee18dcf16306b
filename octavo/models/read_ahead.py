"""Tensors of files in the order of their bytes, read at the disk's speed and given back behind."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from octavo.errors import ModelError
from octavo.models.file_tensor import PIECE_BYTES, FileTensor, Staging
from octavo.models.mapped_file import PAGE, MappedFile

# Bytes that may be in memory before their consumer asks for them: a share of all, within bounds.
_WINDOW = (4 << 20, 64 << 20)
_WINDOW_SHARE = 32
# Bytes from which a tensor is copied by pieces: what a CPU may hold twice, and what a transfer to a
# GPU gains by.
_LARGE_CPU, _LARGE_GPU = 2 * PIECE_BYTES, 1 << 20


class AsRead(Iterator[tuple[str, torch.Tensor]]):
    """Weights that come as fast as they are read, so that what the consumer does with them counts."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]]):
        self._weights = weights

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._weights)


LEAST_RUN = 64 << 10
"""Bytes from which on a run of a tensor is read apart from what lies before and after it.

Shorter are a rank's pieces of the rows of a matrix that is split by columns, which is read as a whole: two
ranks of one host took 5.2 and 5.8 s for 1.6 GB from a cold disk, with pieces of 8 KiB 8.6 s twice, and 1.4 s
of CPU instead of 1.7 (`benchmarks/rank_loading.py --run-kib 64 4`, on a busy machine). The disk is read once
either way, since ranks share the page cache."""


class Span(NamedTuple):
    """Bytes of a file that the consumer gets as a whole.

    Attributes:
        parts: offset from the span's and number of bytes of what is read of it, in order; None: all.
    """

    file: MappedFile
    offset: int
    nbytes: int
    parts: Sequence[tuple[int, int]] | None = None


class ReadAhead:
    """Reads spans in order, a window ahead of their consumer; a context manager.

    The consumer is one thread, and takes the spans in the same order: `take(i)` says that it is at
    span i, and lets all before go.
    """

    def __init__(self, spans: Sequence[Span]):
        self._spans = spans
        self._parted = any(span.parts is not None for span in spans)
        # What is read, in runs; of span i those from `_first_run[i]` on.
        self._runs: list[Span] = []
        self._first_run = [0]
        for span in spans:
            parts = ((0, span.nbytes),) if span.parts is None else span.parts
            self._runs += [Span(span.file, span.offset + at, nbytes) for at, nbytes in parts]
            self._first_run.append(len(self._runs))
        self._starts = [0]
        for run in self._runs:
            self._starts.append(self._starts[-1] + run.nbytes)
        low, high = _WINDOW
        self._window = min(max(self._starts[-1] // _WINDOW_SHARE, low), high)
        self._piece = max(1 << 20, min(PIECE_BYTES, self._window // 4))
        self._at = 0  # bytes of all runs that the consumer has behind it
        self._asked = 0  # byte of the consumer's file up to which it made sure of its memory
        self._kept = 0  # byte of it from which on it holds memory
        self._closed = False
        self._resume_at: float = math.inf  # of `_at`, beyond which the waiting thread has work
        self._moved = threading.Condition()
        self._staging: dict[torch.device, Staging] = {}
        self._current = 0
        self._thread = threading.Thread(target=self._run, name="octavo-read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify()
        self._thread.join()
        for staging in self._staging.values():
            staging.close()

    def take(self, index: int, device: torch.device) -> torch.Tensor:
        """The bytes of span `index`, uint8; a `FileTensor` where they are many."""
        before, self._current = self._spans[self._current].file, index
        file, offset, nbytes, _ = self._spans[index]
        if file is not before or index == 0:
            if index:
                before.give_back(self._kept, before.size - self._kept)
            self._asked = self._kept = offset
        # Small tensors share their calls to the system.
        elif offset - self._kept >= self._piece:
            file.give_back(self._kept, offset - self._kept)
            self._kept = offset - offset % PAGE
        self._move(self._starts[self._first_run[index]])
        view = file.bytes(offset, nbytes)
        if nbytes > (_LARGE_CPU if device.type == "cpu" else _LARGE_GPU):
            self._asked = offset + nbytes
            return FileTensor.of(view, self)
        if self._parted:
            self.before(file.address + offset, nbytes)
        elif offset + nbytes > self._asked:
            self._asked = min(max(offset + nbytes, offset + self._piece), file.size)
            file.populate(offset, self._asked - offset)
        return view

    # ---- what a FileTensor asks -------------------------------------------------------------------

    def before(self, address: int, nbytes: int) -> None:
        file = self._spans[self._current].file
        first = address - file.address
        last = first + nbytes
        for run in range(self._run_at(first), self._first_run[self._current + 1]):
            _, offset, length, _ = self._runs[run]
            if offset >= last:
                break
            begin = max(first, offset)
            file.populate(begin, min(last, offset + length) - begin)

    def after(self, address: int, nbytes: int) -> None:
        file = self._spans[self._current].file
        first = address - file.address
        file.give_back(first, nbytes)
        run = self._run_at(first + nbytes - 1)
        if run < self._first_run[self._current + 1]:
            _, offset, length, _ = self._runs[run]
            self._move(self._starts[run] + min(max(0, first + nbytes - offset), length))

    def _run_at(self, byte: int) -> int:
        """The current span's first run that ends behind a byte of the file; the next span's if none does."""
        first, last = self._first_run[self._current], self._first_run[self._current + 1]
        return bisect.bisect_right(self._runs, byte, first, last, key=lambda run: run.offset + run.nbytes)

    def staging(self, device: torch.device) -> Staging:
        if device not in self._staging:
            self._staging[device] = Staging(device)
        return self._staging[device]

    # ---- the reading thread -----------------------------------------------------------------------

    def _move(self, at: int) -> None:
        self._at = max(self._at, at)
        if self._at > self._resume_at:
            with self._moved:
                self._moved.notify()

    def _run(self) -> None:
        announced = position = 0
        total = self._starts[-1]
        while position < total:
            with self._moved:
                self._resume_at = position - self._window
                self._moved.wait_for(lambda: self._closed or self._at > self._resume_at)
                self._resume_at = math.inf
                if self._closed:
                    return
            # Bytes that the consumer fetched by itself are no use any more.
            position, announced = max(position, self._at), max(announced, self._at)
            if position == total:
                return
            # The disk gets its orders a window further ahead; their pages are nobody's memory yet.
            while announced < min(position + 2 * self._window, total):
                file, offset, nbytes, _ = self._part(announced)
                file.announce(offset, nbytes)
                announced += nbytes
            file, offset, nbytes, _ = self._part(position)
            try:
                file.populate(offset, nbytes)
            except ModelError:
                return  # the consumer meets it where it happens
            position += nbytes

    def _part(self, position: int) -> Span:
        """The next piece of one file from a position among all runs' bytes on, joined over runs."""
        index = bisect.bisect_right(self._starts, position) - 1
        file, offset, _, _ = self._runs[index]
        begin = offset + position - self._starts[index]
        count = self._starts[index + 1] - position
        while count < self._piece and index + 1 < len(self._runs):
            index += 1
            following = self._runs[index]
            if following.file is not file or following.offset != begin + count:
                break
            count += following.nbytes
        return Span(file, begin, min(count, self._piece))


def read_spans(spans: Sequence[Span], device: torch.device) -> Iterator[torch.Tensor]:
    """The bytes of spans, one by one: each is the consumer's to copy from until it asks for the next.

    Args:
        spans: in the order in which they lie on the disk.
        device: where the consumer copies them.

    Raises:
        ModelError: a file cannot be read.
    """
    if not spans:
        return
    threads = torch.get_num_threads()
    try:
        # Copies of single tensors don't gain by threads that wait for each other, and on a busy machine
        # lose by them.
        torch.set_num_threads(1)
        with ReadAhead(spans) as ahead:
            for index in range(len(spans)):
                yield ahead.take(index, device)
    finally:
        torch.set_num_threads(threads)
