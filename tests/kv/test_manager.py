"""Block tables of several groups: lookup against a brute-force oracle, freeing, growing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.keys import NO_EXTRAS, BlockHasher
from octavo.kv.manager import NEVER, NULL, KVManager, Sequence

SIZE = 4


def manager(windows, num_blocks: int = 400) -> KVManager:
    fmt = KVFormat("float32", SIZE, 1, 1)
    groups = [KVGroup(f"g{g}", (g,), fmt, window) for g, window in enumerate(windows)]
    return KVManager(groups, num_blocks, BlockHasher("sha256", b"r" * 32, SIZE))


def computed(kv: KVManager, tokens: np.ndarray) -> Sequence:
    """A request all of whose tokens are computed in one step, and its full blocks registered."""
    seq = kv.new_sequence(NO_EXTRAS)
    assert kv.grow(seq, len(tokens)) is not None
    kv.register(seq, tokens, len(tokens), 0)
    return seq


def oracle(kv: KVManager, seq: Sequence, tokens: np.ndarray) -> int:
    """Blocks of the longest beginning whose every row to come finds all it sees."""
    keys: list[bytes] = []
    most = (len(tokens) - 1) // SIZE
    kv.hasher.extend(keys, tokens, most, NO_EXTRAS)
    for length in range(most, 0, -1):
        end = length * SIZE
        needed = []
        for g, group in enumerate(kv.groups):
            window = group.sliding_window
            first = 0 if window is None else max(0, end - window + 1)
            # A window of one token sees nothing before it; the last block has to be known all the same.
            needed += [(g, p // SIZE) for p in range(min(first, end - 1), end)]
        if all(kv.pool.find(g, keys[i]) is not None for g, i in needed):
            return length
    return 0


@pytest.mark.parametrize(
    "windows",
    [(None,), (5,), (1,), (None, 3), (9, None), (None, 4, 17), (1, 2), (5, 12), (None, None, 1, 8)],
    ids=str,
)
def test_the_longest_prefix_on_which_all_groups_agree(windows):
    rng = random.Random(str(windows))
    lengths = set()
    for _ in range(120):
        kv = manager(windows)
        tokens = np.array([rng.randrange(9) for _ in range(rng.randint(1, 70))], np.int32)
        first = computed(kv, tokens)
        # Some blocks are lost, more often of the end or of the beginning than here and there.
        blocks = [list(table) for table in first.tables]
        kv.free(first)
        for table in blocks:
            kind = rng.random()
            cut = rng.randint(0, len(table))
            for i, block in enumerate(table):
                if (kind < 0.3 and i >= cut) or (kind > 0.7 and i < cut // 2) or rng.random() < 0.06:
                    kv.pool.forget(block)
        again = kv.new_sequence(NO_EXTRAS)
        want = oracle(kv, again, tokens)
        prefix = kv.find_prefix(again, tokens)
        assert prefix.num_blocks == want
        lengths.add(want)
        free = kv.num_free_after(prefix)
        kv.adopt(again, prefix)
        assert kv.pool.num_free == free
        kv.check([(again, want * SIZE)])
        for g, (table, window) in enumerate(zip(again.tables, windows, strict=True)):
            first_held = 0 if window is None else max(0, want * SIZE - window + 1) // SIZE
            assert table == [NULL] * first_held + blocks[g][first_held:want]
    assert len(lengths) > 8


def test_a_lookup_asks_for_each_block_at_most_once(monkeypatch):
    kv = manager((5, 40))
    tokens = np.arange(400, dtype=np.int32)
    first = computed(kv, tokens)
    kv.free(first)
    for i in range(0, 90, 7):
        kv.pool.forget(kv.pool.find(0, first.keys[i]))
        kv.pool.forget(kv.pool.find(1, first.keys[i + 3]))
    asked = []
    find = kv.pool.find
    monkeypatch.setattr(kv.pool, "find", lambda g, key: asked.append((g, key)) or find(g, key))
    kv.find_prefix(kv.new_sequence(NO_EXTRAS), tokens)
    assert len(asked) == len(set(asked))


def test_blocks_behind_a_window_are_freed_and_still_found():
    kv = manager((None, 6))
    tokens = np.arange(40, dtype=np.int32)
    seq = computed(kv, tokens)
    assert (kv.pool.num_used, kv.capacity(seq)) == (20, 40)
    following = kv.free_passed(seq, 40)
    # Row 40 sees 35 .. 40: blocks 0 .. 7 are passed, the ninth once a row sees 36 at the earliest.
    assert seq.num_passed == [0, 8]
    assert seq.tables[1][:8] == [NULL] * 8
    assert following == 41
    assert kv.pool.num_used == 12
    kv.check([(seq, 40)])
    assert kv.free_passed(seq, 40) == 41
    kv.free_passed(seq, 41)
    assert seq.num_passed == [0, 9]
    again = kv.new_sequence(NO_EXTRAS)
    assert kv.find_prefix(again, tokens[:21]).num_blocks == 5
    kv.free(seq)
    assert kv.pool.num_used == 0
    assert kv.find_prefix(again, tokens[:21]).num_passed == [0, 3]


def test_blocks_that_were_freed_before_their_tokens_were_known_get_no_key():
    kv = manager((None, 6))
    tokens = np.arange(40, dtype=np.int32)
    seq = kv.new_sequence(NO_EXTRAS)
    kv.grow(seq, 40)
    kv.free_passed(seq, 40)
    kv.register(seq, tokens, 40, 0)
    assert kv.pool.num_cached() == 10 + 2
    kv.check([(seq, 40)])


def test_without_windows_nothing_is_freed_early():
    kv = manager((None,))
    seq = computed(kv, np.arange(40, dtype=np.int32))
    assert kv.free_passed(seq, 40) == NEVER
    assert kv.pool.num_used == 10
    assert not kv.has_windows


def test_full_attention_gets_room_for_known_tokens_and_windows_for_scheduled_ones():
    kv = manager((None, 6, None), num_blocks=26)
    seq = kv.new_sequence(NO_EXTRAS)
    assert kv.missing([0, 0, 0], 8, 40) == [10, 2, 10]
    new = kv.grow(seq, 8, 40)
    assert [len(blocks) for blocks in new] == [10, 2, 10]
    assert kv.capacity(seq) == 8
    assert kv.grow(seq, 28) is None  # 5 more, 4 are free
    assert kv.fit(seq, 28) == 24
    assert kv.fit(seq, 11) == 11
    assert [len(blocks) for blocks in kv.grow(seq, 24)] == [0, 4, 0]
    assert kv.fit(seq, 40) == 24
    kv.check([(seq, 8)])


def test_most_that_a_request_will_hold():
    kv = manager((None, 6))
    none = kv.no_prefix()
    # 40 tokens: 10 blocks, and at most 5 + 8 consecutive tokens of the window's.
    assert kv.missing_at_most(none, 40, rows=8) == 10 + 4
    assert kv.missing_at_most(none, 9, rows=100) == 3 + 3
    tokens = np.arange(40, dtype=np.int32)
    kv.free(computed(kv, tokens))
    prefix = kv.find_prefix(kv.new_sequence(NO_EXTRAS), tokens[:33])
    assert (prefix.num_blocks, list(map(len, prefix.held))) == (8, [8, 2])
    assert kv.missing_at_most(prefix, 33, rows=1) == 1 + 1


def test_groups_lose_the_end_of_a_request_together():
    kv = manager((None, None), num_blocks=10)
    tokens = np.arange(20, dtype=np.int32)
    kv.free(computed(kv, tokens))
    other = kv.new_sequence(NO_EXTRAS)
    kv.grow(other, 8)  # takes four blocks: the last two of both groups
    assert kv.find_prefix(kv.new_sequence(NO_EXTRAS), tokens).num_blocks == 3


def test_what_was_computed_last_is_found_though_parts_were_known_before():
    kv = manager((None, 6), num_blocks=36)
    tokens = np.arange(24, dtype=np.int32)
    first = computed(kv, tokens)
    kv.free(first)
    kv.free(computed(kv, tokens + 100))
    kv.pool.forget(kv.pool.find(1, first.keys[4]))  # without it, five blocks are of no use
    again = kv.new_sequence(NO_EXTRAS)
    assert kv.find_prefix(again, tokens[:21]).num_blocks == 4
    kv.free(computed(kv, tokens[:23]))  # by a request that could not look it up
    other = kv.new_sequence(NO_EXTRAS)
    kv.grow(other, 48)  # takes what was used least recently
    assert kv.find_prefix(again, tokens[:21]).num_blocks == 5


def test_keys_of_a_failed_step_go_though_its_blocks_were_freed():
    kv = manager((None, 6))
    tokens = np.arange(40, dtype=np.int32)
    seq = kv.new_sequence(NO_EXTRAS)
    kv.grow(seq, 40)
    kv.register(seq, tokens, 16, step=3)
    kv.register(seq, tokens, 40, step=4)
    kv.free_passed(seq, 40)
    kv.roll_back(4)
    kv.free(seq)
    assert kv.find_prefix(kv.new_sequence(NO_EXTRAS), tokens).num_blocks == 4
