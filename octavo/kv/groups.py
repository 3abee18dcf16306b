"""Which attention layers share a block table, and what one block id stands for. Knows no tensor."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from octavo.errors import ModelError
from octavo.kv.format import KVFormat, KVGroup

# What a full-attention layer's block weighs beside a sliding layer's: it is kept for the whole context,
# which is about so many windows long where memory matters.
_FULL_WEIGHT = 8


def group_layers(
    layers: Sequence[tuple[int | None, KVFormat]], bounds: Sequence[int] | None = None
) -> list[KVGroup]:
    """The KV groups of a model's attention layers, given each one's sliding window and format.

    Where layers are divided among pipeline stages, `bounds` are the first layer of every stage and the number
    of layers: every stage has a part of each group (`stage_groups`), so that one table of blocks serves all,
    and n is the number of a group's layers on any one stage.

    Layers of one kind (window and format) are split, in their order, into groups of n, so that a block
    id means a page of the same size whichever group takes it: one pool of equal pages serves all. The
    last group of a kind may have fewer layers, the rest of its pages is unused. Full attention comes
    first, then windows in the order of their first layers.

    Raises:
        ModelError: layers whose blocks differ in bytes.
    """
    stages = [range(*pair) for pair in itertools.pairwise(bounds or (0, len(layers)))]
    # Of each kind, its layers on each stage.
    kinds: dict[tuple[int | None, KVFormat], list[list[int]]] = defaultdict(lambda: [[] for _ in stages])
    for stage, numbers in enumerate(stages):
        for number in numbers:
            kinds[layers[number]][stage].append(number)
    sizes = {fmt.layer_block_bytes() for _, fmt in kinds}
    if len(sizes) > 1:
        raise ModelError(
            f"layers of this model have KV blocks of {' and '.join(map(str, sorted(sizes)))} bytes: only "
            "models whose attention layers agree in heads, head size and KV dtype are supported"
        )
    size = _group_size([(window, max(map(len, parts))) for (window, _), parts in kinds.items()])
    ordered = sorted(kinds.items(), key=lambda item: item[0][0] is not None)
    return [
        KVGroup(
            "full" if window is None else f"sliding_{window}",
            tuple(number for numbers in parts for number in numbers[first : first + size]),
            fmt,
            window,
        )
        for (window, fmt), parts in ordered
        for first in range(0, max(map(len, parts)), size)
    ]


def stage_groups(groups: Sequence[KVGroup], layers: range) -> list[KVGroup]:
    """One stage's part of each of a model's groups, perhaps of no layers; numbers count from its first."""
    return [
        replace(group, layers=tuple(i - layers.start for i in group.layers if i in layers))
        for group in groups
    ]


def _group_size(kinds: list[tuple[int | None, int]]) -> int:
    """Layers of a group, given each kind's window and number of layers (of one stage): what wastes least.

    A larger n leaves more of a kind's last group unused; a smaller one makes more groups, each with
    a table to keep and to map at every step, which weighs as much as one layer's window.
    """

    def cost(size: int) -> int:
        groups = [-(-count // size) for _, count in kinds]
        weights = [_FULL_WEIGHT if window is None else 1 for window, _ in kinds]
        return sum(n * (size * weight + 1) for n, weight in zip(groups, weights, strict=True))

    return min(range(max(count for _, count in kinds), 0, -1), key=cost)


def layers_per_page(groups: Sequence[KVGroup]) -> int:
    """Layers whose blocks one page holds."""
    return max(len(group.layers) for group in groups)


def page_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes that one block id of the pool stands for, whichever group takes it."""
    return max(group.block_bytes() for group in groups)


def describe_pool(groups: Sequence[KVGroup], num_blocks: int) -> str:
    """One line for the log."""
    text = f"{num_blocks} blocks of {groups[0].format.block_size} tokens"
    if len(groups) == 1 and groups[0].sliding_window is None:
        return text
    kinds = Counter(group.name for group in groups)
    names = " + ".join(f"{count} {name}" for name, count in kinds.items())
    return f"{text} x {layers_per_page(groups)} layers (groups: {names})"
