"""The host tier's books: which host slot holds the block of which key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

Entry = tuple[int, bytes]  # KV group and block key


class HostTier:
    """Slots `0 .. num_slots - 1` of host memory, each for one block, found by (KV group, block key).

    A slot is free, being filled, or filled. Whoever fills or reads a slot holds a reference; the ones that
    nobody holds give way to new blocks, least recently used first.

    Invariants (see `check`): a key maps to one slot that carries it; a slot waits in the order of use
    exactly when it is filled, mapped and not held; one that is held is never taken for another block, and
    one whose key was dropped meanwhile is free once it is released.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.num_evicted = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_entry: dict[Entry, int] = {}
        self._entries: list[Entry | None] = [None] * num_slots
        self._refs = [0] * num_slots
        self._filled = [False] * num_slots
        self._idle: OrderedDict[int, None] = OrderedDict()  # slots that may be taken, oldest first

    @property
    def num_used(self) -> int:
        """Slots that hold a block or are held."""
        return self.num_slots - len(self._free)

    @property
    def num_available(self) -> int:
        """Slots that nobody holds."""
        return len(self._free) + len(self._idle)

    def contains(self, group: int, key: bytes) -> bool:
        """Whether a block is there or on its way."""
        return (group, key) in self._by_entry

    def lacking(self, found: Iterable[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
        """Those device blocks, of blocks and what they hold, that are not there and not on their way."""
        by_entry = self._by_entry
        return [pair for pair in found if pair[1] not in by_entry]

    def used_slots(self) -> list[int]:
        """The slots that hold a block or are held."""
        return sorted(set(range(self.num_slots)).difference(self._free))

    def find(self, entry: Entry) -> int | None:
        """The slot that holds a block, None if it is not there yet."""
        slot = self._by_entry.get(entry)
        return slot if slot is not None and self._filled[slot] else None

    def findable(self) -> list[tuple[Entry, int]]:
        """The blocks that can be found, and their slots."""
        return [(entry, slot) for entry, slot in self._by_entry.items() if self._filled[slot]]

    def used_last(self) -> Iterator[Entry]:
        """The blocks that nobody holds, those that were used last first."""
        for slot in reversed(self._idle):
            if (entry := self._entries[slot]) is not None:
                yield entry

    def touch(self, entry: Entry) -> None:
        """A block was used last now."""
        slot = self._by_entry.get(entry)
        if slot is not None and slot in self._idle:
            self._idle.move_to_end(slot)

    def reserve(self, entry: Entry) -> int | None:
        """Take a slot to fill, held by the caller; None if all are held. The key must not be there."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot, _ = self._idle.popitem(last=False)
            self._unmap(slot)
            self.num_evicted += 1
        else:
            return None
        assert entry not in self._by_entry, "a block is in the host tier already"
        self._by_entry[entry] = slot
        self._entries[slot] = entry
        self._filled[slot] = False
        self._refs[slot] = 1
        return slot

    def filled(self, slot: int) -> None:
        """What a reserved slot was taken for is in it: it can be found, and the caller lets go."""
        self._filled[slot] = True
        self.release([slot])

    def failed(self, slot: int) -> None:
        """A reserved slot was not filled: its key is dropped, and the caller lets go."""
        self._unmap(slot)
        self.release([slot])

    def acquire(self, slots: Iterable[int]) -> None:
        """Hold slots that were found."""
        for slot in slots:
            self._refs[slot] += 1
            self._idle.pop(slot, None)

    def release(self, slots: Iterable[int]) -> None:
        """Let go of slots; they were used last now."""
        for slot in slots:
            self._refs[slot] -= 1
            if not self._refs[slot]:
                if self._entries[slot] is None:
                    self._free.append(slot)
                else:
                    self._idle[slot] = None

    def drop(self, entry: Entry) -> None:
        """Forget a block, if it is there; a slot that is held is free when it is let go."""
        slot = self._by_entry.get(entry)
        if slot is not None:
            self._unmap(slot)
            if not self._refs[slot]:
                del self._idle[slot]
                self._free.append(slot)

    def clear(self) -> None:
        """Forget all blocks."""
        for entry in list(self._by_entry):
            self.drop(entry)

    def _unmap(self, slot: int) -> None:
        entry = self._entries[slot]
        if entry is not None:
            del self._by_entry[entry]
            self._entries[slot] = None

    def check(self, held: Iterable[int]) -> None:
        """Verify all invariants (for tests).

        Args:
            held: the slots of every copy, read and write under way, one entry per reference.

        Raises:
            AssertionError: naming the first violation.
        """
        counts = [0] * self.num_slots
        for slot in held:
            counts[slot] += 1
        assert counts == self._refs, "references differ from the copies that hold host slots"
        assert len(set(self._free)) == len(self._free), "a host slot is free twice"
        mapped = {slot for slot, entry in enumerate(self._entries) if entry is not None}
        assert {self._entries[slot]: slot for slot in mapped} == self._by_entry, "keys and host slots differ"
        idle = {slot for slot in mapped if not self._refs[slot]}
        assert all(self._filled[slot] for slot in idle), "a host slot that nobody fills is not filled"
        assert idle == set(self._idle), "the order of use differs from the host slots that nobody holds"
        free = {slot for slot in range(self.num_slots) if slot not in mapped and not self._refs[slot]}
        assert free == set(self._free), "a host slot is lost"
