"""With how many of the same blocks the running requests begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_UNKNOWN = -1
_ALL = np.iinfo(np.int32).max  # the reference's own number
_GONE = -1


class SharedPrefix:
    """Keeps, by slot, how many leading blocks a request has in common with the reference, which is one of
    them, or was.

    So a request's tables are compared once, after it has entered its slot, and a step takes the least of its
    requests' numbers. That is never too much: what two requests have in common with a third, they have in
    common. It is exact if the reference is among them, or if their numbers differ. Else, when requests have
    left, a look at the next block shows whether they have more in common than with a reference that is gone,
    and one of them takes its place.

    Invariant: a number that is known holds for as long as its request is in the slot. The blocks of a table
    of full attention don't change once they are there, and one that is added later is in no other table.
    """

    def __init__(self, num_slots: int, groups: Sequence[int]):
        """`groups`: the KV groups that count (those without a window; none: nothing is ever shared)."""
        self._groups = groups
        self._common = np.full(num_slots, _UNKNOWN, np.int32)
        self._reference = _GONE
        self._tables: list[list[int]] = [[] for _ in groups]  # the reference's
        self._some_left = True  # since it was last seen that a reference that is gone is good enough

    def enter(self, slot: int) -> None:
        """A request has come into a slot."""
        self._common[slot] = _UNKNOWN

    def leave(self, slot: int) -> None:
        """A request has left its slot."""
        self._some_left = True
        if slot == self._reference:
            self._reference = _GONE
            self._tables = [list(table) for table in self._tables]  # its owner clears it

    def count(self, slots: np.ndarray, tables_at: Callable[[int], list[list[int]]]) -> int:
        """Leading blocks that the requests in `slots` have in common, in all groups that count.

        Args:
            slots: integer `[n]`, at least two.
            tables_at: block table per KV group of the request in a slot.
        """
        if not self._groups:
            return 0
        least = self._least(slots, tables_at)
        if self._some_left and self._reference == _GONE:
            self._some_left = False
            if self._agree(slots, tables_at, least):
                self._reference = int(slots[-1])
                tables = tables_at(self._reference)
                self._tables = [tables[g] for g in self._groups]
                self._common[:] = _UNKNOWN
                self._common[self._reference] = _ALL
                least = self._least(slots, tables_at)
        return least

    def _least(self, slots: np.ndarray, tables_at: Callable[[int], list[list[int]]]) -> int:
        """The least number of the requests in `slots`; those that are not known are found."""
        least = int(self._common[slots].min())
        if least == _UNKNOWN:
            found = 0
            for slot in slots[self._common[slots] == _UNKNOWN].tolist():
                tables = tables_at(slot)
                pairs = zip(self._groups, self._tables, strict=True)
                found = min(common_beginning(tables[g], reference, found) for g, reference in pairs)
                self._common[slot] = found
            least = int(self._common[slots].min())
        return least

    def _agree(self, slots: np.ndarray, tables_at: Callable[[int], list[list[int]]], column: int) -> bool:
        """Whether all tables have the same block at a place."""
        first = tables_at(int(slots[0]))
        return all(
            len(tables[g]) > column and tables[g][column] == first[g][column]
            for tables in map(tables_at, slots.tolist())
            for g in self._groups
        )


def common_beginning(a: list[int], b: list[int], guess: int = 0) -> int:
    """How many leading elements of two lists are equal; fast where it is none, or as many as `guess`."""
    most = min(len(a), len(b))
    if not most or a[0] != b[0]:
        return 0
    low, high = 1, most + 1  # so many are equal, so many are not
    if 1 < guess <= most:
        if a[:guess] == b[:guess]:
            low = guess
            if guess == most or a[guess] != b[guess]:
                return guess
        else:
            high = guess
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
