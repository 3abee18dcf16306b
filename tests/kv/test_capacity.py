"""The arithmetic of blocks against counting them one step after another."""

from __future__ import annotations

import random

import pytest

from octavo.kv.capacity import blocks_passed, most_blocks, passed_at, request_blocks, token_capacity
from octavo.kv.format import KVFormat, KVGroup


def group(window: int | None, block_size: int) -> KVGroup:
    return KVGroup("g", (0,), KVFormat("float32", block_size, 1, 1), window)


def seen_blocks(first_row: int, end: int, window: int | None, size: int) -> set[int]:
    """Blocks that hold what rows `first_row .. end - 1` see."""
    first = 0 if window is None else max(0, first_row - window + 1)
    return {position // size for position in range(first, end)}


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 8, 9, 10, 30])
def test_most_blocks_is_what_some_step_sees(window, size):
    for rows in (1, 2, 5, 16):
        most = 0
        for num_tokens in range(1, 70):
            for first_row in range(max(0, num_tokens - rows), num_tokens):
                most = max(most, len(seen_blocks(first_row, num_tokens, window, size)))
            assert most_blocks(group(window, size), num_tokens, rows) == most


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_blocks_before_a_window(window, size):
    for position in range(60):
        passed = blocks_passed(position, window, size)
        assert passed == min(seen_blocks(position, position + 1, window, size))
        assert passed_at(passed, window, size) <= position or passed == 0
        assert passed_at(passed + 1, window, size) > position


def test_capacity_is_the_longest_context_that_fits():
    rng = random.Random(0)
    for _ in range(300):
        size = rng.choice([1, 4, 8])
        groups = [group(rng.choice([None, 1, 3, 8, 20]), size) for _ in range(rng.randint(1, 4))]
        blocks, limit = rng.randint(0, 40), rng.randint(1, 200)
        capacity = token_capacity(groups, blocks, limit)
        assert 0 <= capacity <= limit
        assert request_blocks(groups, capacity) <= blocks
        if capacity < limit:
            assert request_blocks(groups, capacity + 1) > blocks


def test_windows_alone_hold_any_context():
    windows = [group(1024, 16)] * 3
    assert request_blocks(windows, 10**9) == 3 * 65
    assert token_capacity(windows, 195, 10**9) == 10**9
    assert token_capacity(windows, 194, 10**9) == 64 * 16  # two groups' worth more would let it slide
    assert token_capacity([group(None, 16), *windows], 195 + 100, 10**9) == 1600
