"""What moves between the device's pool, the host tier and the disk, and when. Knows no tensor."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.kv.host_tier import Entry, HostTier
from octavo.kv.pool import BlockPool
from octavo.kv.tiers import BlockStore
from octavo.messages import CoreStats
from octavo.step_messages import BlockCopies

logger = logging.getLogger(__name__)

_LEAST_AHEAD = 32  # blocks that are copied out before their turn to be reused, at least
_MOST_AHEAD = 1024
_COPIES_AHEAD = 2  # such copies under way at a time: more would only hold blocks longer
_MOST_WRITES = 8  # blocks on their way to disk at a time
_KEPT_AT_ONCE = 32  # blocks that are copied out at a time, for the disk, when an engine ends
_LATENCY = 0.5e-3  # seconds until a copy of any size is known to be through
_BUSY_WEIGHT = 2.0  # how much worse computing is than copying where others want the device
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class TierRates:
    """What the choice between copying and computing rests on (`ModelFacts`; 0: not known)."""

    block_bytes: int
    host_copy_rate: float = 0.0
    prefill_rate: float = 0.0


@dataclass(eq=False)
class Waiter:
    """Copies that one request waits for, by number, and reads from disk, by ticket."""

    copies: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    failed: bool = False  # one of the copies
    num_read: int = 0  # blocks that came from disk

    def __bool__(self) -> bool:
        return bool(self.copies or self.reads)


@dataclass
class _Copy:
    """A copy under way: its entries, host slots and device blocks, in parallel."""

    entries: list[Entry]
    slots: list[int]
    blocks: list[int]
    into: bool = False
    holds: bool = False  # whether it holds its blocks: a fence against reuse
    step: int = -1  # with which it goes out
    registers: bool = True
    waiters: list[Waiter] = field(default_factory=list)


@dataclass
class _Transfer:
    """A read or write of the store under way."""

    entry: Entry
    slot: int
    waiters: list[Waiter] | None  # of a read; the first one asked for it


class Offloading:
    """Owns the host tier and all copies under way; decides what is copied out.

    A block of the pool that carries a key and will be reused soon is copied out ahead of that, beside the
    steps, and held meanwhile. One that is reused before its turn came (its request was preempted just now)
    is copied out by a copy that the step waits for. So whatever leaves the device is in the host tier, or was
    when it left. What is in the host tier goes on to the store, if there is one, oldest first.

    Invariants (see `check`): a host slot is held once per copy, read or write that touches it; a device
    block that a copy reads is held until the copy is through, unless the step itself waits for it; a block
    is found in the host tier only after the copy that brought it is through and all steps have run well on
    which its contents rest.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_slots: int,
        rates: TierRates,
        store: BlockStore | None = None,
        private: bool = False,
    ):
        """`private`: keys are those of single requests, of use to nobody else; they stay off the disk."""
        self.tier = HostTier(num_slots)
        self._pool = pool
        self._rates = rates
        self._store = None if private else store
        self._evicted: list[tuple[int, Entry]] = []
        pool.evicted = self._evicted
        self._copies: dict[int, _Copy] = {}
        self._queued: list[int] = []  # numbers of copies into the device that go out with the next step
        self._loading: dict[Entry, tuple[int, int]] = {}  # to be found: copy that brings it, and the block
        self._cleaning = 0  # copies ahead of reuse under way
        self._demand = 0.0  # blocks with a key that a step reuses, of late
        self._early: list[tuple[int, bool]] = []  # copies that ended before steps that they rest on, and how
        self._transfers: dict[int, _Transfer] = {}
        self._reading: dict[Entry, int] = {}  # tickets of reads under way
        self._unwritten: collections.deque[tuple[int, Entry]] = collections.deque()
        self._writes = 0
        self._keeping: collections.deque[Entry] = collections.deque()
        self._ranks: dict[Entry, int] = {}  # of what is kept at the engine's end: how many were used later
        self._number = 0

    # ---- what is under way ----------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a copy or a read is under way that somebody may wait for."""
        return bool(self._copies) or len(self._transfers) > self._writes

    @property
    def copying(self) -> bool:
        """Whether a copy is under way that a step's result will tell of."""
        return bool(self._copies)

    def num_held(self) -> int:
        """Device blocks that nobody but a copy holds: they will be free once it is through."""
        refs, _ = self._pool.holders()
        return sum(refs[b] == 1 for copy in self._copies.values() if copy.holds for b in copy.blocks)

    def wait(self, timeout: float) -> None:
        """Block until a read may have ended, or `timeout` seconds."""
        if self._store is not None:
            self._store.wait(timeout)

    # ---- from the host --------------------------------------------------------------------------

    def find(self, group: int, key: bytes) -> int | None:
        """The device block that a copy under way fills with `key`, or the host slot that holds it.

        Returns:
            The block, or `-2 - slot`, or None.
        """
        loading = self._loading.get((group, key))
        if loading is not None:
            return loading[1]
        slot = self.tier.find((group, key))
        return None if slot is None else -2 - slot

    def worth(self, num_blocks: int, num_tokens: int, busy: bool) -> bool:
        """Whether copying `num_blocks` blocks brings `num_tokens` tokens sooner than computing them.

        Args:
            busy: whether others want the device, which copies leave to them.
        """
        rates = self._rates
        if not rates.host_copy_rate or not rates.prefill_rate:
            return True
        ahead = sum(len(self._copies[number].blocks) for number in self._queued)
        copying = _LATENCY + (num_blocks + ahead) * rates.block_bytes / rates.host_copy_rate
        computing = num_tokens / rates.prefill_rate
        return copying <= computing * (_BUSY_WEIGHT if busy else 1.0)

    def load(self, waiter: Waiter, entries: list[Entry], slots: list[int], blocks: list[int]) -> None:
        """Copy host slots into device blocks that a request holds; others may find these, and wait too."""
        self.tier.acquire(slots)
        number = self._take_number(_Copy(entries, slots, blocks, into=True))
        self._queued.append(number)
        self._loading.update((e, (number, block)) for e, block in zip(entries, blocks, strict=True))
        self._await(waiter, number)

    def join(self, waiter: Waiter, entries: Iterable[Entry]) -> None:
        """A request holds blocks, some of which copies under way may be filling: it waits for these."""
        if self._loading:
            for number in {self._loading[entry][0] for entry in entries if entry in self._loading}:
                self._await(waiter, number)

    def _await(self, waiter: Waiter, number: int) -> None:
        waiter.copies.add(number)
        self._copies[number].waiters.append(waiter)

    # ---- from disk ------------------------------------------------------------------------------

    @property
    def has_store(self) -> bool:
        """Whether there is a tier behind the host's."""
        return self._store is not None

    def stored(self, group: int, key: bytes) -> bool:
        """Whether the store seems to have a block."""
        return self._store is not None and self._store.contains(group, key)

    def fetch(self, waiter: Waiter, wanted: Sequence[Entry]) -> int:
        """Read those of `wanted` into host slots that only the store has; returns how many are on their way,
        those that are being read for others included.

        Those that are in the host tier will be used with them, so they are not what makes room.
        """
        assert self._store is not None
        missing, there = [], 0
        for entry in reversed(wanted):  # the first ones are used last, and so stay longest
            if not self.tier.contains(*entry):
                missing.append(entry)
            elif (ticket := self._reading.get(entry)) is not None:
                self._await_read(waiter, ticket)
            else:
                self.tier.touch(entry)
                there += 1
        room = self.tier.num_available - there
        for entry in reversed(missing[max(0, len(missing) - room) :] if room > 0 else []):
            slot = self.tier.reserve(entry)
            if slot is None:
                break
            ticket = self._reading[entry] = self._store.read(*entry, slot)
            self._transfers[ticket] = _Transfer(entry, slot, [])
            self._await_read(waiter, ticket)
        return len(waiter.reads)

    def _await_read(self, waiter: Waiter, ticket: int) -> None:
        waiter.reads.add(ticket)
        waiters = self._transfers[ticket].waiters
        assert waiters is not None
        waiters.append(waiter)

    def poll(self, stats: CoreStats) -> None:
        """Take in what the store has read and written; begin to write what it lacks."""
        if self._store is None:
            return
        for ticket, ok in self._store.poll():
            transfer = self._transfers.pop(ticket)
            if not ok:
                stats.disk_failures += 1
            if transfer.waiters is None:
                self._writes -= 1
                stats.disk_blocks_out += ok
                self.tier.release([transfer.slot])
                if self._ranks:
                    self.tier.drop(transfer.entry)  # its slot is the next one's
                continue
            if self._reading.get(transfer.entry) == ticket:
                del self._reading[transfer.entry]
            for waiter in transfer.waiters:
                waiter.reads.discard(ticket)
            stats.disk_blocks_in += ok
            transfer.waiters[0].num_read += ok
            if ok:
                self.tier.filled(transfer.slot)
            else:
                self.tier.failed(transfer.slot)
        while self._unwritten and self._writes < _MOST_WRITES:
            slot, entry = self._unwritten.popleft()
            if self.tier.find(entry) == slot and not self._store.contains(*entry):
                self.tier.acquire([slot])
                ticket = self._store.write(*entry, slot, self._ranks.get(entry))
                self._transfers[ticket] = _Transfer(entry, slot, None)
                self._writes += 1

    def keep(self) -> None:
        """The engine ends: from here on bring what is cached to the store, as much as that holds, what was
        used last first. Requests must have ended."""
        assert self._store is not None
        entries = itertools.chain(self._pool.used_last(), self.tier.used_last())
        kept = itertools.islice(dict.fromkeys(entries), self._store.num_blocks)
        self._ranks = {entry: number for number, entry in enumerate(kept)}
        self._keeping.extend(self._ranks)
        self._unwritten.clear()

    @property
    def keeps(self) -> bool:
        """Whether some of what is to be kept is not there yet."""
        return bool(self._keeping or self._copies or self._unwritten or self._writes)

    def _kept(self, step: int) -> BlockCopies | None:
        """A copy out of the next blocks that are to be kept; what the host tier has goes on from there."""
        assert self._store is not None
        found: list[tuple[int, Entry]] = []
        most = min(_KEPT_AT_ONCE, self.tier.num_available)
        while self._keeping and len(found) < most:
            entry = self._keeping[0]
            slot, block = self.tier.find(entry), self._pool.find(*entry)
            if slot is not None and not self._store.contains(*entry):
                if found:  # which may take its slot
                    break
                self._unwritten.append((slot, entry))
            elif block is not None and not self._store.contains(*entry):
                if self._unwritten:
                    break
                found.append((block, entry))
            self._keeping.popleft()
        return self._out(found, step, urgent=False)

    # ---- to the host ----------------------------------------------------------------------------

    def plan(self, step: int, clean: bool) -> list[BlockCopies]:
        """The copies that go out with a step, in the order in which they are to run.

        Args:
            step: its number.
            clean: whether blocks may be copied out ahead; not where every free block is needed.
        """
        copies = []
        reused = len(self._evicted)
        self._demand = max(reused, 0.9 * self._demand)
        if reused:
            missing = self.tier.lacking(self._evicted)
            if len(missing) < reused:
                for _, entry in self._evicted:
                    self.tier.touch(entry)
            once = {entry: (block, entry) for block, entry in missing}
            evicted = self._out(list(once.values()), step, urgent=True)
            self._evicted.clear()
            if evicted is not None:
                copies.append(evicted)
        for number in self._queued:
            copy = self._copies[number]
            copy.step = step
            copies.append(BlockCopies(number, _NONE, _NONE, _array(copy.slots), _array(copy.blocks)))
        self._queued.clear()
        ahead = None
        if self._keeping and not (self._copies or self._unwritten or self._writes):
            ahead = self._kept(step)
        elif clean and self._cleaning < _COPIES_AHEAD:
            ahead = self._out(self._dirty_ahead(), step, urgent=False)
        if ahead is not None:
            copies.append(ahead)
        return copies

    def _dirty_ahead(self) -> list[tuple[int, Entry]]:
        """Blocks with a key that the pool will reuse soon and that are not in the host tier."""
        count = min(max(_LEAST_AHEAD, int(2 * self._demand)), _MOST_AHEAD, self._pool.num_free // 2)
        _, entries = self._pool.holders()
        ahead = ((block, entries[block]) for block in self._pool.next_reused(count))
        return self.tier.lacking((block, entry) for block, entry in ahead if entry is not None)

    def _out(self, found: list[tuple[int, Entry]], step: int, urgent: bool) -> BlockCopies | None:
        entries, slots, blocks = [], [], []
        for block, entry in found:
            slot = self.tier.reserve(entry)
            if slot is None:
                break
            entries.append(entry)
            slots.append(slot)
            blocks.append(block)
        if not entries:
            return None
        number = self._take_number(_Copy(entries, slots, blocks, holds=not urgent, step=step))
        if not urgent:
            self._pool.hold(blocks)
            self._cleaning += 1
        return BlockCopies(number, _array(blocks), _array(slots), _NONE, _NONE, urgent=urgent)

    # ---- results --------------------------------------------------------------------------------

    def step_ended(self, step: int, done: list[int], failed: list[int], stats: CoreStats) -> None:
        """A step has run well, and told of copies that are through or have failed.

        With several steps under way it may tell of copies out that went with later ones, while some of the
        steps between, whose rows these read, may still fail: until they have run, such copies count as under
        way.
        """
        ended = [*self._early, *((number, True) for number in done), *((number, False) for number in failed)]
        self._early = []
        for number, ok in ended:
            copy = self._copies[number]
            if copy.into or copy.step <= step + 1:
                self.ended(number, ok, stats)
            else:
                self._early.append((number, ok))

    def ended(self, number: int, ok: bool, stats: CoreStats) -> None:
        """A copy is through, or has failed and touches nothing any more."""
        copy = self._copies.pop(number)
        count, num_bytes = len(copy.blocks), len(copy.blocks) * self._rates.block_bytes
        if copy.into:
            self.tier.release(copy.slots)
            for entry, block in zip(copy.entries, copy.blocks, strict=True):
                if copy.registers:
                    del self._loading[entry]
                if not ok:
                    self.tier.drop(entry)
                elif copy.registers:
                    self._pool.register(*entry, block)
            for waiter in copy.waiters:
                waiter.copies.discard(number)
                waiter.failed |= not ok
            if ok:
                stats.host_blocks_in += count
                stats.host_bytes_in += num_bytes
            return
        if copy.holds:
            self._pool.unhold(copy.blocks)
            self._cleaning -= 1
        for slot, entry in zip(copy.slots, copy.entries, strict=True):
            if ok:
                self.tier.filled(slot)
                if self._store is not None:
                    self._unwritten.append((slot, entry))
            else:
                self.tier.failed(slot)
        if ok:
            stats.host_blocks_out += count
            stats.host_bytes_out += num_bytes
        else:
            logger.warning("%d KV blocks could not be copied to host memory: they will be recomputed", count)

    def roll_back(self, step: int) -> None:
        """A step has failed: what was copied out with it or later may rest on what it did not compute."""
        for copy in self._copies.values():
            if not copy.into and copy.step >= step:
                for entry in copy.entries:
                    self.tier.drop(entry)

    def forget(self, entry: Entry) -> None:
        """Nobody will ask for a block any more."""
        self.tier.drop(entry)
        block = self._pool.find(*entry)
        if block is not None:
            self._pool.discard(block)

    def reset(self) -> None:
        """Forget all blocks of the host tier."""
        self.tier.clear()
        self._unwritten.clear()
        self._loading.clear()
        for copy in self._copies.values():
            copy.registers = False

    def _take_number(self, copy: _Copy) -> int:
        number = self._number
        self._number += 1
        self._copies[number] = copy
        return number

    # ---- checks ---------------------------------------------------------------------------------

    def held_blocks(self) -> list[list[int]]:
        """The device blocks that copies hold, a list per copy (for tests)."""
        return [copy.blocks for copy in self._copies.values() if copy.holds]

    def check(self) -> None:
        """Verify the invariants of the tier and of what is under way (for tests).

        Raises:
            AssertionError: naming the first violation.
        """
        slots = [slot for copy in self._copies.values() for slot in copy.slots]
        self.tier.check(slots + [transfer.slot for transfer in self._transfers.values()])
        into = {number: copy for number, copy in self._copies.items() if copy.into}
        expected = {
            entry: (number, block)
            for number, copy in into.items()
            if copy.registers
            for entry, block in zip(copy.entries, copy.blocks, strict=True)
        }
        assert expected == self._loading, "copies into the device and what they bring differ"
        assert set(self._queued) <= set(into), "a copy is queued that is not under way"
        assert self._cleaning == sum(copy.holds for copy in self._copies.values()), "copies ahead miscounted"
        refs, _ = self._pool.holders()
        for copy in into.values():
            assert all(refs[block] for block in copy.blocks), "a copy fills a block that nobody holds"
        assert self._writes == sum(t.waiters is None for t in self._transfers.values()), "writes miscounted"


def _array(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)
