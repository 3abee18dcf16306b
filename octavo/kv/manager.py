"""Block tables and prefix cache of the requests of one scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np

from octavo.kv.capacity import blocks_of, blocks_passed, most_blocks, passed_at
from octavo.kv.format import KVGroup
from octavo.kv.keys import BlockHasher, ExtraKeys
from octavo.kv.offloading import Offloading, TierRates, Waiter
from octavo.kv.pool import BlockPool
from octavo.kv.tiers import BlockStore
from octavo.messages import CoreStats

NULL = -1  # a table's entry whose block has been freed, or was never held: no later row reads it
NEVER = np.iinfo(np.int32).max
_Find = Callable[[int, bytes], "int | None"]


@dataclass
class Sequence:
    """KV side of one request: its block table per KV group and its chain of keys.

    The first `num_passed` entries of a group's table are null: they lie wholly before the window of
    every row to come. `keys` covers full blocks whose tokens are known; the first `num_registered` of
    them have been offered to the pool, or will be once the copies are through that `waiter` waits for.
    """

    extras: ExtraKeys
    tables: list[list[int]]
    num_passed: list[int]
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    waiter: Waiter = field(default_factory=Waiter)
    looked_on_disk: bool = False  # once is enough until it has run

    def held(self) -> list[list[int]]:
        """The blocks of each group's table, without the null entries."""
        return [table[n:] if n else table for table, n in zip(self.tables, self.num_passed, strict=True)]


@dataclass(frozen=True)
class Prefix:
    """Blocks that hold a request's beginning: per group `num_blocks` entries, as in its table.

    `held` are the entries behind the first `num_passed`: blocks of the pool, or `-2 - slot` for one of the
    host tier, `num_loads` of them, which needs a block yet. The first `on_device` blocks need no copy.
    """

    num_blocks: int
    num_passed: list[int]
    held: list[list[int]]
    num_loads: int = 0
    on_device: int = 0


class KVManager:
    """Owns the pool and the tables of running requests; finds, extends, registers and frees them.

    Tables of full-attention groups hold all known tokens of a request; those of groups with a window
    hold what is scheduled, less the blocks that the window has passed.

    Invariant: a key is registered only for a block that is complete, or will be by a step that has
    been scheduled before any step that could read it.
    """

    def __init__(
        self,
        groups: list[KVGroup],
        num_blocks: int,
        hasher: BlockHasher | None,
        num_host_blocks: int = 0,
        rates: TierRates | None = None,
        store: BlockStore | None = None,
    ):
        """
        Args:
            hasher: computes the keys of blocks; None: requests share nothing.
            num_host_blocks: slots of the host tier. Without `hasher` it serves preempted requests alone, by
                keys that are each one's own.
            rates: needed with a host tier.
            store: the tier behind it.
        """
        self.groups = groups
        self.block_size = groups[0].format.block_size
        self.pool = BlockPool(num_blocks)
        self.shares = hasher is not None  # whether requests find each other's blocks
        self.offloading: Offloading | None = None
        if num_host_blocks:
            assert rates is not None
            self.offloading = Offloading(self.pool, num_host_blocks, rates, store, private=hasher is None)
            hasher = hasher or BlockHasher("sha256", os.urandom(32), self.block_size)
        self.hasher = hasher
        self._num_sequences = 0
        self._keeps_all = [group.sliding_window is None for group in groups]
        self._full = [g for g, group in enumerate(groups) if group.sliding_window is None]
        self._windows = [(g, w) for g, group in enumerate(groups) if (w := group.sliding_window) is not None]
        self._recent: list[tuple[int, int]] = []  # (step, block) registered by steps not yet completed

    @property
    def has_windows(self) -> bool:
        """Whether any group frees blocks before its requests end."""
        return bool(self._windows)

    @property
    def full_groups(self) -> Items[int]:
        """Numbers of the groups that keep the whole context."""
        return self._full

    def new_sequence(self, extras: ExtraKeys) -> Sequence:
        """An empty table."""
        if self.hasher is not None and not self.shares:  # keys that nobody else has: the root is random
            self._num_sequences += 1
            extras = replace(extras, cache_salt=str(self._num_sequences))
        return Sequence(extras, [[] for _ in self.groups], [0] * len(self.groups))

    # ---- prefixes -------------------------------------------------------------------------------

    def no_prefix(self) -> Prefix:
        """Nothing found."""
        return Prefix(0, [0] * len(self.groups), [[] for _ in self.groups])

    def find_prefix(self, seq: Sequence, token_ids: np.ndarray, busy: bool = False) -> Prefix:
        """The longest known beginning of `token_ids` that lets the rows after it be computed.

        Full attention needs all of its blocks, a window those that the next row sees. At least the
        last token is left to compute, since its logits are needed. What the host tier has beside the pool
        counts if copying it is quicker than computing (`Offloading.worth`; `busy` as there).
        """
        if self.hasher is None:
            return self.no_prefix()
        if self.offloading is None:
            return self._longest(seq, token_ids, self.pool.find)
        prefix = self._longest(seq, token_ids, self._find_near)
        loads = sum(entry < NULL for blocks in prefix.held for entry in blocks)
        if not loads:
            return prefix
        alone = self._longest(seq, token_ids, self._find_without_copy)
        tokens = (prefix.num_blocks - alone.num_blocks) * self.block_size
        if not self.offloading.worth(loads, tokens, busy):
            return alone
        return replace(prefix, num_loads=loads, on_device=alone.num_blocks)

    def fetch(self, seq: Sequence, token_ids: np.ndarray, stats: CoreStats) -> int:
        """Begin to read from disk what makes the known beginning longer; returns how many blocks."""
        offloading = self.offloading
        if offloading is None or not offloading.has_store or seq.looked_on_disk or self.hasher is None:
            return 0
        seq.looked_on_disk = True
        near = self._longest(seq, token_ids, self._find_near)
        stats.disk_cache_queries += len(token_ids) - near.num_blocks * self.block_size
        far = self._longest(seq, token_ids, self._find_anywhere)
        if far.num_blocks <= near.num_blocks:
            return 0
        wanted = [
            (group, seq.keys[i])
            for group, (passed, blocks) in enumerate(zip(far.num_passed, far.held, strict=True))
            for i, entry in enumerate(blocks, passed)
            if entry < NULL
        ]
        return offloading.fetch(seq.waiter, wanted)

    def _find_near(self, group: int, key: bytes) -> int | None:
        """As in `Prefix.held`: in the pool, on its way there, or in the host tier."""
        assert self.offloading is not None
        block = self.pool.find(group, key)
        return self.offloading.find(group, key) if block is None else block

    def _find_without_copy(self, group: int, key: bytes) -> int | None:
        found = self._find_near(group, key)
        return None if found is None or found < NULL else found

    def _find_anywhere(self, group: int, key: bytes) -> int | None:
        """As `_find_near`; what only the disk has is a number below `NULL` as well."""
        assert self.offloading is not None
        found = self._find_near(group, key)
        return NULL - 1 if found is None and self.offloading.stored(group, key) else found

    def _longest(self, seq: Sequence, token_ids: np.ndarray, find: _Find) -> Prefix:
        assert self.hasher is not None
        full = self._find_full(seq, token_ids, (len(token_ids) - 1) // self.block_size, find)
        if not self._windows:
            return Prefix(len(full[0]), [0] * len(full), full, on_device=len(full[0]))
        most = len(full[0]) if full else (len(token_ids) - 1) // self.block_size
        self.hasher.extend(seq.keys, token_ids, most, seq.extras)
        length, seen = self._find_windows(seq.keys, most, find)
        num_passed = [0] * len(self.groups)
        held: list[list[int]] = [[] for _ in self.groups]
        for g, blocks in zip(self._full, full, strict=True):
            held[g] = blocks[:length]
        for g, window in self._windows:
            num_passed[g] = first = blocks_passed(length * self.block_size, window, self.block_size)
            held[g] = [seen[g][i] for i in range(first, length)]
        return Prefix(length, num_passed, held, on_device=length)

    def _find_full(self, seq: Sequence, token_ids: np.ndarray, most: int, find: _Find) -> list[list[int]]:
        """Per full-attention group, the blocks up to the first that one of them misses."""
        found: list[list[int]] = [[] for _ in self._full]
        assert self.hasher is not None
        for i in range(most if found else 0):
            self.hasher.extend(seq.keys, token_ids, i + 1, seq.extras)  # no further than the hits reach
            blocks = [find(g, seq.keys[i]) for g in self._full]
            if None in blocks:
                break
            for table, block in zip(found, blocks, strict=True):
                table.append(block)  # type: ignore[arg-type]
        return found

    def _find_windows(
        self, keys: Items[bytes], most: int, find: _Find
    ) -> tuple[int, dict[int, dict[int, int]]]:
        """The longest beginning of at most `most` blocks whose last blocks every window's group holds.

        Searched from the end: a block that one group misses and needs ends the beginning before it, and
        what was found behind it is needed no more. So each block is looked up at most once per group.
        Returns the length, and per group the blocks found, by number.
        """
        seen: dict[int, dict[int, int]] = {g: {} for g, _ in self._windows}
        length = i = most
        first = self._firsts_seen(length)
        while i > min(first.values()):
            i -= 1
            for g in seen:
                if first[g] <= i:
                    block = find(g, keys[i])
                    if block is None:
                        length = i
                        first = self._firsts_seen(length)
                        break
                    seen[g][i] = block
        return length, seen

    def _firsts_seen(self, length: int) -> dict[int, int]:
        """Per group with a window, the first block that must be found for a beginning of `length`.

        It is the last one at the latest: a window of one token needs none, but no request may count as
        known that nobody has ever sent.
        """
        return {
            g: min(blocks_passed(length * self.block_size, window, self.block_size), max(length - 1, 0))
            for g, window in self._windows
        }

    def num_free_after(self, prefix: Prefix) -> int:
        """Free blocks left once those of `prefix` are taken (some of them are free, but cached), and those
        that its copies fill."""
        held = prefix.held if not prefix.num_loads else [[b for b in h if b >= 0] for h in prefix.held]
        return self.pool.num_free - sum(self.pool.count_free(blocks) for blocks in held) - prefix.num_loads

    def adopt(self, seq: Sequence, prefix: Prefix) -> None:
        """Put blocks found by key at the head of an empty table, and begin to copy what the host tier has.

        No row may be computed before `seq.waiter` waits for nothing, and none at all if it has failed then.
        """
        offloading = self.offloading
        held = prefix.held
        if prefix.num_loads:
            held = [[block for block in blocks if block >= 0] for blocks in held]
        for blocks in held:
            self.pool.acquire(blocks)
        if prefix.num_loads:
            held = self._load(seq, prefix)
        for table, passed, blocks in zip(seq.tables, prefix.num_passed, held, strict=True):
            table.extend([NULL] * passed + blocks)
        seq.num_passed = list(prefix.num_passed)
        seq.num_registered = prefix.num_blocks
        if offloading is not None:
            places = ((g, i) for g, n in enumerate(prefix.num_passed) for i in range(n, prefix.num_blocks))
            offloading.join(seq.waiter, ((g, seq.keys[i]) for g, i in places))

    def _load(self, seq: Sequence, prefix: Prefix) -> list[list[int]]:
        """Blocks per group, those of the host tier replaced by new ones that copies under way fill."""
        assert self.offloading is not None
        new = iter(self.pool.allocate(prefix.num_loads))
        entries, slots, blocks, held = [], [], [], []
        for group, (passed, found) in enumerate(zip(prefix.num_passed, prefix.held, strict=True)):
            held.append([next(new) if entry < NULL else entry for entry in found])
            for i, (entry, block) in enumerate(zip(found, held[-1], strict=True), passed):
                if entry < NULL:
                    entries.append((group, seq.keys[i]))
                    slots.append(-2 - entry)
                    blocks.append(block)
        self.offloading.load(seq.waiter, entries, slots, blocks)
        return held

    # ---- growing and freeing --------------------------------------------------------------------

    def capacity(self, seq: Sequence) -> int:
        """Tokens that all tables have entries for."""
        tables = seq.tables
        length = len(tables[0]) if len(tables) == 1 else min(map(len, tables))
        return length * self.block_size

    def missing(self, lengths: Iterable[int], num_tokens: int, num_known: int = 0) -> list[int]:
        """Blocks per group that tables of the given lengths lack; other arguments as `grow`."""
        in_window = -(-num_tokens // self.block_size)
        if num_known <= num_tokens:  # the common case, made short
            return [in_window - length if in_window > length else 0 for length in lengths]
        in_full = -(-num_known // self.block_size)
        ends = [in_full if keeps_all else in_window for keeps_all in self._keeps_all]
        return [max(0, end - length) for end, length in zip(ends, lengths, strict=True)]

    def missing_at_most(self, prefix: Prefix, num_known: int, rows: int) -> int:
        """Most blocks beside `prefix` that a request will hold until its known tokens are computed.

        Args:
            rows: most rows of a step.
        """
        whole = blocks_of(num_known, self.block_size) - prefix.num_blocks
        count = whole * len(self._full)
        for g, _ in self._windows:
            count += min(whole, most_blocks(self.groups[g], num_known, rows) - len(prefix.held[g]))
        return count

    def grow(self, seq: Sequence, num_tokens: int, num_known: int = 0) -> list[list[int]] | None:
        """Extend the tables; new blocks per group, or None if too few are free.

        Args:
            seq: the request.
            num_tokens: tokens that are computed or scheduled; every group gets room for them.
            num_known: tokens that full-attention groups get room for, if more.
        """
        counts = self.missing([len(table) for table in seq.tables], num_tokens, num_known)
        if sum(counts) > self.pool.num_free:
            return None
        new = [self.pool.allocate(count) for count in counts]
        for table, blocks in zip(seq.tables, new, strict=True):
            table += blocks
        return new

    def fit(self, seq: Sequence, num_tokens: int) -> int:
        """Tokens, at most `num_tokens`, that `grow` can make room for now."""
        lengths = [len(table) for table in seq.tables]
        blocks = blocks_of(num_tokens, self.block_size)
        while sum(self.missing(lengths, blocks * self.block_size)) > self.pool.num_free:
            blocks -= 1
        return min(num_tokens, blocks * self.block_size)

    def shrink(self, seq: Sequence, num_tokens: int) -> int:
        """Free the blocks behind those of so many tokens, in which no step in flight writes; how many that
        were."""
        keep, freed = blocks_of(num_tokens, self.block_size), 0
        for table in seq.tables:
            extra = table[keep:]
            del table[keep:]
            self.pool.release(extra)
            freed += len(extra)
        return freed

    def free_passed(self, seq: Sequence, num_computed: int) -> int:
        """Free blocks before the windows of all rows from position `num_computed` on.

        Their keys stay, if they have any. Steps in flight may still read them: what is written there
        later queues behind those.

        Returns:
            At how many computed tokens there will be more to free.
        """
        following = NEVER
        for g, window in self._windows:
            table, before = seq.tables[g], seq.num_passed[g]
            passed = blocks_passed(num_computed, window, self.block_size)
            if passed > before:
                self.pool.release(table[before:passed])
                table[before:passed] = [NULL] * (passed - before)
                seq.num_passed[g] = passed
            following = min(following, passed_at(seq.num_passed[g] + 1, window, self.block_size))
        return following

    def free(self, seq: Sequence) -> None:
        """Release all blocks of a request; its keys stay, for when it is scheduled again."""
        held = seq.held()
        if len(held) == 1:
            self.pool.release(held[0])
        else:
            # All groups' last blocks become reusable first: a beginning is of use where all have it.
            ends = max(map(len, seq.tables))
            order = [
                table[i]
                for i in range(ends)
                for table, passed in zip(seq.tables, seq.num_passed, strict=True)
                if passed <= i < len(table)
            ]
            self.pool.release(order)
        for g, table in enumerate(seq.tables):
            table.clear()
            seq.num_passed[g] = 0
        seq.num_registered = 0
        seq.looked_on_disk = False
        seq.waiter = Waiter()

    def num_own(self, seq: Sequence) -> int:
        """Blocks that a request alone holds."""
        refs, _ = self.pool.holders()
        return sum(refs[block] == 1 for blocks in seq.held() for block in blocks)

    def end(self, seq: Sequence) -> None:
        """A request that holds no blocks any more is done: keys that were its own are forgotten."""
        if self.offloading is not None and not self.shares:
            for group in range(len(self.groups)):
                for key in seq.keys:
                    self.offloading.forget((group, key))

    # ---- keys -----------------------------------------------------------------------------------

    def register(self, seq: Sequence, token_ids: np.ndarray, num_tokens: int, step: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable.

        The caller guarantees that these tokens are known and that their rows are scheduled, the
        last of them by step `step`.
        """
        full = num_tokens // self.block_size
        if self.hasher is None or full <= seq.num_registered:
            return
        self.hasher.extend(seq.keys, token_ids, full, seq.extras)
        if len(seq.tables) == 1 and full == seq.num_registered + 1:  # the common case, made short
            block = seq.tables[0][full - 1]
            if block != NULL and self.pool.register(0, seq.keys[full - 1], block):
                self._recent.append((step, block))
            seq.num_registered = full
            return
        for group, (table, passed) in enumerate(zip(seq.tables, seq.num_passed, strict=True)):
            for i in range(max(seq.num_registered, passed), full):
                if self.pool.register(group, seq.keys[i], table[i]):
                    self._recent.append((step, table[i]))
        seq.num_registered = full

    def complete(self, step: int) -> None:
        """A step has run: what it registered is final."""
        if self._recent:
            self._recent = [entry for entry in self._recent if entry[0] > step]

    def roll_back(self, step: int) -> None:
        """A step has failed: whatever it or a later one registered holds no valid KV."""
        for registered, block in self._recent:
            if registered >= step:
                self.pool.forget(block)
        self._recent = [entry for entry in self._recent if entry[0] < step]
        if self.offloading is not None:
            self.offloading.roll_back(step)

    def reset_cache(self) -> None:
        """Forget all cached blocks, of the pool and of the host tier."""
        self.pool.reset_cache()
        if self.offloading is not None:
            self.offloading.reset()

    # ---- checks ---------------------------------------------------------------------------------

    def check(self, running: Items[tuple[Sequence, int]], others: Items[list[int]] = ()) -> None:
        """Verify tables and pool (for tests).

        Args:
            running: every request that holds blocks, with the number of tokens that are scheduled.
            others: blocks that are held beside their tables.

        Raises:
            AssertionError: naming the first violation.
        """
        for seq, num_computed in running:
            for group, table, passed in zip(self.groups, seq.tables, seq.num_passed, strict=True):
                assert table[:passed] == [NULL] * passed, "a passed entry holds a block"
                assert NULL not in table[passed:], "an entry that rows will read is null"
                window = group.sliding_window
                most = 0 if window is None else blocks_passed(num_computed, window, self.block_size)
                assert passed <= most, "a block was freed that a row will read"
        tables = [blocks for seq, _ in running for blocks in seq.held()]
        tables += others
        if self.offloading is not None:
            self.offloading.check()
            tables += self.offloading.held_blocks()
        self.pool.check(tables)
