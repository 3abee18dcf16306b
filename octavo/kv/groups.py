"""Which attention layers share a block table, and what one block id stands for. Knows no tensor."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from octavo.errors import ModelError
from octavo.kv.format import KVFormat, KVGroup

# What a full-attention layer's block weighs beside a sliding layer's: it is kept for the whole context,
# which is about so many windows long where memory matters.
_FULL_WEIGHT = 8


def group_layers(layers: Sequence[tuple[int | None, KVFormat]]) -> list[KVGroup]:
    """The KV groups of a model's attention layers, given each one's sliding window and format.

    Layers of one kind (window and format) are split, in their order, into groups of n, so that a block
    id means a page of the same size whichever group takes it: one pool of equal pages serves all. The
    last group of a kind may have fewer layers, the rest of its pages is unused. Full attention comes
    first, then windows in the order of their first layers.

    Raises:
        ModelError: layers whose blocks differ in bytes.
    """
    kinds: dict[tuple[int | None, KVFormat], list[int]] = defaultdict(list)
    for number, kind in enumerate(layers):
        kinds[kind].append(number)
    sizes = {fmt.layer_block_bytes() for _, fmt in kinds}
    if len(sizes) > 1:
        raise ModelError(
            f"layers of this model have KV blocks of {' and '.join(map(str, sorted(sizes)))} bytes: only "
            "models whose attention layers agree in heads, head size and KV dtype are supported"
        )
    size = _group_size([(window, len(numbers)) for (window, _), numbers in kinds.items()])
    ordered = sorted(kinds.items(), key=lambda item: item[0][0] is not None)
    return [
        KVGroup(
            "full" if window is None else f"sliding_{window}",
            tuple(numbers[first : first + size]),
            fmt,
            window,
        )
        for (window, fmt), numbers in ordered
        for first in range(0, len(numbers), size)
    ]


def _group_size(kinds: list[tuple[int | None, int]]) -> int:
    """Layers of a group, given each kind's window and number of layers: what wastes least.

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
