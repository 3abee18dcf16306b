"""What earlier requests have yielded, and where in it some tokens stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from operator import mul

import numpy as np

from octavo.speculative.continuation import UNKNOWN

_LENGTHS = (1, 2, 4, 8, 16)  # of the runs of tokens that are indexed
_PIECE = 512  # tokens that are indexed at a time
_WORD = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15
_WEIGHTS = [
    pow(_SPREAD, 2 * i + 1, 1 << 64) for i in range(_LENGTHS[-1])
]  # of a run's tokens, the last first


class Outputs:
    """The newest outputs of earlier requests, in a ring of tokens, and an index of them.

    The index is that of a sliding-window compressor: for runs of 1, 2, 4, 8 and 16 tokens a table says, by a
    hash, where such a run ended last, and each place where one ended before. Places are counted from the
    start, so those that have left the ring are recognized, and nothing need be taken out. A run may have the
    hash of another: who looks compares the tokens.

    Outputs are indexed in pieces, a piece each time that one comes in or something is looked for, so that a
    long one holds nobody up.
    """

    longest_run = _LENGTHS[-1]

    def __init__(self, max_requests: int, max_tokens: int):
        """
        Args:
            max_requests: outputs that are kept.
            max_tokens: tokens of them that are kept; a power of two. Each takes 34 bytes in all.
        """
        self.tokens = np.zeros(max_tokens, np.int32)
        self._max_requests = max_requests
        self._bits = max(8, max_tokens.bit_length() - 2)
        self._before = np.zeros((len(_LENGTHS), max_tokens), np.int32)
        self._clear()

    def _clear(self) -> None:
        # Zero is the place before the first output, where no run ends: nothing there.
        self._last = np.zeros((len(_LENGTHS), 1 << self._bits), np.int32)
        self._starts: deque[int] = deque()  # place of the separator before each output
        self._end = 0  # place of the separator behind the newest
        self._indexed = 0  # the first place that isn't indexed
        self.tokens[0] = UNKNOWN

    @property
    def oldest(self) -> int:
        """The place before the first token that is kept."""
        return self._starts[0] if self._starts else self._end

    def add(self, output: np.ndarray) -> None:
        """Keep an output (int32 `[n]`); the oldest leave for it."""
        size = len(self.tokens)
        output = output[-(size - 2) :]
        if not len(output) or not self._max_requests:
            return
        if self._end + size > np.iinfo(np.int32).max:
            self._clear()
        start = self._end
        self._end = start + len(output) + 1
        self._starts.append(start)
        while self._end - self._starts[0] >= size or len(self._starts) > self._max_requests:
            self._starts.popleft()
        self.tokens[np.arange(start + 1, self._end) % size] = output
        self.tokens[self._end % size] = UNKNOWN
        self.index()

    def index(self) -> None:
        """Index a piece of what isn't yet."""
        if self._indexed >= self._end:
            return
        begin = max(self._indexed, self.oldest)
        end = min(self._end, begin + _PIECE)
        places = np.arange(begin, end, dtype=np.int32)
        reach = _LENGTHS[-1] - 1
        window = self.tokens[np.arange(begin - reach, end) % len(self.tokens)]
        window = window.astype(np.uint64)
        hashes = np.zeros(len(places), np.uint64)
        for back, weight in enumerate(_WEIGHTS):
            hashes += window[reach - back : len(window) - back] * np.uint64(weight)
            if back + 1 in _LENGTHS:
                slots = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
                self._link(_LENGTHS.index(back + 1), places, slots)
        self._indexed = end

    def _link(self, level: int, places: np.ndarray, slots: np.ndarray) -> None:
        """Chain places of runs by their slots in the table.

        Args:
            places: int32 `[n]`, ascending.
            slots: int64 `[n]`.
        """
        order = np.argsort(slots, kind="stable")
        ranked, sorted_places = slots[order], places[order]
        earlier = np.empty_like(places)
        earlier[1:] = sorted_places[:-1]
        first = np.empty(len(places), bool)
        first[0] = True
        np.not_equal(ranked[1:], ranked[:-1], out=first[1:])
        earlier[first] = self._last[level, ranked[first]]
        self._before[level, sorted_places % len(self.tokens)] = earlier
        self._last[level, slots] = places  # of equal slots the last one stays

    def find(self, ending: list[int], most: int) -> Iterator[tuple[int, list[int]]]:
        """The newest places at which runs that are like the newest tokens end, of the longest run first.

        Args:
            ending: the newest tokens, the newest first.
            most: places.

        Yields:
            tokens of the run, and at least one place, the oldest first.
        """
        oldest, size = self.oldest, len(self.tokens)
        if oldest == self._end:
            return
        hashes = self._slots_of(ending)
        for level in range(len(hashes) - 1, -1, -1):
            place = self._last.item(level, hashes[level])
            found: list[int] = []
            while place > oldest and len(found) < most:
                found.append(place)
                place = self._before.item(level, place % size)
            if found:
                found.reverse()
                yield _LENGTHS[level], found

    def _slots_of(self, ending: list[int]) -> list[int]:
        """Slots in the tables of the runs that end with the newest token: what `index` computes for many."""
        hashes = list(accumulate(map(mul, ending, _WEIGHTS)))
        shift = 64 - self._bits
        return [(hashes[n - 1] & _WORD) >> shift for n in _LENGTHS if n <= len(hashes)]
