"""Which attention layers share a block table. Knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.kv.format import KVFormat, KVGroup


def group_layers(layers: Sequence[tuple[int | None, KVFormat]]) -> list[KVGroup]:
    """The KV groups of a model's attention layers, given each one's sliding window and format.

    Layers of both kinds in one model share one group that keeps the whole context: sliding layers
    still see their window only, but free no block early.
    """
    windows = [window for window, _ in layers]
    window = windows[0] if len(set(windows)) == 1 else None
    if window is not None:
        name = f"sliding_{window}"
    else:
        # The name enters the block keys, and values depend on which layers slide.
        name = "_".join(["full", *(f"{layer}.sliding.{w}" for layer, w in enumerate(windows) if w)])
    return [KVGroup(name, tuple(range(len(windows))), layers[0][1], window)]
