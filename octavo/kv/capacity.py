"""How many blocks a request holds, and how long a context a pool serves."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from octavo.kv.format import KVGroup


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that the first `num_tokens` tokens of a request fill or begin."""
    return -(-num_tokens // block_size)


def blocks_passed(position: int, window: int, block_size: int) -> int:
    """How many leading blocks no row from `position` on sees: it sees `window` tokens, itself included."""
    return max(0, position - window + 1) // block_size


def passed_at(num_blocks: int, window: int, block_size: int) -> int:
    """The first position whose row sees none of the leading `num_blocks` blocks."""
    return num_blocks * block_size + window - 1


def most_blocks(group: KVGroup, num_tokens: int, rows: int = 1) -> int:
    """Most blocks that a request holds in one group while it computes `num_tokens` tokens.

    Args:
        group: with its window, before which blocks are freed.
        num_tokens: tokens whose KV is stored.
        rows: most rows of the request in one step. The scheduler gives fewer where blocks are short,
            so a request of any length goes through with what 1 row needs.
    """
    size = group.format.block_size
    whole = blocks_of(num_tokens, size)
    if group.sliding_window is None:
        return whole
    # The rows and the window before them begin anywhere in a block.
    span = group.sliding_window - 1 + rows
    return min(whole, (span - 2) // size + 2)


def request_blocks(groups: Sequence[KVGroup], num_tokens: int, rows: int = 1) -> int:
    """Most blocks that a request holds in all groups together; arguments as `most_blocks`."""
    return sum(most_blocks(group, num_tokens, rows) for group in groups)


def token_capacity(groups: Sequence[KVGroup], num_blocks: int, limit: int) -> int:
    """Tokens of the longest context, at most `limit`, that a pool of `num_blocks` blocks holds alone."""
    size = groups[0].format.block_size
    lengths = range(blocks_of(limit, size) + 1)
    longest = bisect.bisect_right(lengths, num_blocks, key=lambda n: request_blocks(groups, n * size)) - 1
    return min(longest * size, limit)
