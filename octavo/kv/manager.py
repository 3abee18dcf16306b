"""Block tables and prefix cache of the requests of one scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from octavo.kv.capacity import blocks_of, blocks_passed, most_blocks, passed_at
from octavo.kv.format import KVGroup
from octavo.kv.keys import BlockHasher, ExtraKeys
from octavo.kv.pool import BlockPool

NULL = -1  # a table's entry whose block has been freed, or was never held: no later row reads it
NEVER = np.iinfo(np.int32).max


@dataclass
class Sequence:
    """KV side of one request: its block table per KV group and its chain of keys.

    The first `num_passed` entries of a group's table are null: they lie wholly before the window of
    every row to come. `keys` covers full blocks whose tokens are known; the first `num_registered` of
    them have been offered to the pool.
    """

    extras: ExtraKeys
    tables: list[list[int]]
    num_passed: list[int]
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0

    def held(self) -> list[list[int]]:
        """The blocks of each group's table, without the null entries."""
        return [table[n:] if n else table for table, n in zip(self.tables, self.num_passed, strict=True)]


@dataclass(frozen=True)
class Prefix:
    """Blocks that hold a request's beginning: per group `num_blocks` entries, as in its table."""

    num_blocks: int
    num_passed: list[int]
    held: list[list[int]]


class KVManager:
    """Owns the pool and the tables of running requests; finds, extends, registers and frees them.

    Tables of full-attention groups hold all known tokens of a request; those of groups with a window
    hold what is scheduled, less the blocks that the window has passed.

    Invariant: a key is registered only for a block that is complete, or will be by a step that has
    been scheduled before any step that could read it.
    """

    def __init__(self, groups: list[KVGroup], num_blocks: int, hasher: BlockHasher | None):
        self.groups = groups
        self.block_size = groups[0].format.block_size
        self.pool = BlockPool(num_blocks)
        self.hasher = hasher
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
        return Sequence(extras, [[] for _ in self.groups], [0] * len(self.groups))

    # ---- prefixes -------------------------------------------------------------------------------

    def no_prefix(self) -> Prefix:
        """Nothing found."""
        return Prefix(0, [0] * len(self.groups), [[] for _ in self.groups])

    def find_prefix(self, seq: Sequence, token_ids: np.ndarray) -> Prefix:
        """The longest known beginning of `token_ids` that lets the rows after it be computed.

        Full attention needs all of its blocks, a window those that the next row sees. At least the
        last token is left to compute, since its logits are needed.
        """
        if self.hasher is None:
            return self.no_prefix()
        full = self._find_full(seq, token_ids, (len(token_ids) - 1) // self.block_size)
        if not self._windows:
            return Prefix(len(full[0]), [0] * len(full), full)
        most = len(full[0]) if full else (len(token_ids) - 1) // self.block_size
        self.hasher.extend(seq.keys, token_ids, most, seq.extras)
        length, seen = self._find_windows(seq.keys, most)
        num_passed = [0] * len(self.groups)
        held: list[list[int]] = [[] for _ in self.groups]
        for g, blocks in zip(self._full, full, strict=True):
            held[g] = blocks[:length]
        for g, window in self._windows:
            num_passed[g] = first = blocks_passed(length * self.block_size, window, self.block_size)
            held[g] = [seen[g][i] for i in range(first, length)]
        return Prefix(length, num_passed, held)

    def _find_full(self, seq: Sequence, token_ids: np.ndarray, most: int) -> list[list[int]]:
        """Per full-attention group, the blocks up to the first that one of them misses."""
        found: list[list[int]] = [[] for _ in self._full]
        assert self.hasher is not None
        for i in range(most if found else 0):
            self.hasher.extend(seq.keys, token_ids, i + 1, seq.extras)  # no further than the hits reach
            blocks = [self.pool.find(g, seq.keys[i]) for g in self._full]
            if None in blocks:
                break
            for table, block in zip(found, blocks, strict=True):
                table.append(block)  # type: ignore[arg-type]
        return found

    def _find_windows(self, keys: Items[bytes], most: int) -> tuple[int, dict[int, dict[int, int]]]:
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
                    block = self.pool.find(g, keys[i])
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
        """Free blocks left once those of `prefix` are taken (some of them are free, but cached)."""
        return self.pool.num_free - sum(self.pool.count_free(blocks) for blocks in prefix.held)

    def adopt(self, seq: Sequence, prefix: Prefix) -> None:
        """Put blocks found by key at the head of an empty table."""
        for table, passed, blocks in zip(seq.tables, prefix.num_passed, prefix.held, strict=True):
            self.pool.acquire(blocks)
            table.extend([NULL] * passed + blocks)
        seq.num_passed = list(prefix.num_passed)
        seq.num_registered = prefix.num_blocks

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

    # ---- checks ---------------------------------------------------------------------------------

    def check(self, running: Items[tuple[Sequence, int]]) -> None:
        """Verify tables and pool (for tests).

        Args:
            running: every request that holds blocks, with the number of tokens that are scheduled.

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
        self.pool.check(blocks for seq, _ in running for blocks in seq.held())
