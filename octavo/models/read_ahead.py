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


class Span(NamedTuple):
    """Bytes of a file that will be read as a whole."""

    file: MappedFile
    offset: int
    nbytes: int


class ReadAhead:
    """Reads spans in order, a window ahead of their consumer; a context manager.

    The consumer is one thread, and takes the spans in the same order: `take(i)` says that it is at
    span i, and lets all before go.
    """

    def __init__(self, spans: Sequence[Span]):
        self._spans = spans
        self._starts = [0]
        for span in spans:
            self._starts.append(self._starts[-1] + span.nbytes)
        low, high = _WINDOW
        self._window = min(max(self._starts[-1] // _WINDOW_SHARE, low), high)
        self._piece = max(1 << 20, min(PIECE_BYTES, self._window // 4))
        self._at = 0  # bytes of all spans that the consumer has behind it
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
        file, offset, nbytes = self._spans[index]
        if file is not before or index == 0:
            if index:
                before.give_back(self._kept, before.size - self._kept)
            self._asked = self._kept = offset
        # Small tensors share their calls to the system.
        elif offset - self._kept >= self._piece:
            file.give_back(self._kept, offset - self._kept)
            self._kept = offset - offset % PAGE
        self._move(self._starts[index])
        view = file.bytes(offset, nbytes)
        if nbytes > (_LARGE_CPU if device.type == "cpu" else _LARGE_GPU):
            self._asked = offset + nbytes
            return FileTensor.of(view, self)
        if offset + nbytes > self._asked:
            self._asked = min(max(offset + nbytes, offset + self._piece), file.size)
            file.populate(offset, self._asked - offset)
        return view

    # ---- what a FileTensor asks -------------------------------------------------------------------

    def before(self, address: int, nbytes: int) -> None:
        file = self._spans[self._current].file
        file.populate(address - file.address, nbytes)

    def after(self, address: int, nbytes: int) -> None:
        file, offset, _ = self._spans[self._current]
        file.give_back(address - file.address, nbytes)
        self._move(self._starts[self._current] + address - file.address - offset + nbytes)

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
                file, offset, nbytes = self._part(announced)
                file.announce(offset, nbytes)
                announced += nbytes
            file, offset, nbytes = self._part(position)
            try:
                file.populate(offset, nbytes)
            except ModelError:
                return  # the consumer meets it where it happens
            position += nbytes

    def _part(self, position: int) -> Span:
        """The next piece of one file from a position among all spans' bytes on, joined over spans."""
        index = bisect.bisect_right(self._starts, position) - 1
        file, offset, nbytes = self._spans[index]
        begin = offset + position - self._starts[index]
        count = self._starts[index + 1] - position
        while count < self._piece and index + 1 < len(self._spans):
            index += 1
            following = self._spans[index]
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
