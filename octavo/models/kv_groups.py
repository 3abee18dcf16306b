"""Which layers share a block table, and what a block of theirs looks like. Knows no tensor."""

from __future__ import annotations

from octavo.kv.format import KVFormat, KVGroup
from octavo.models.config import ModelConfig

_QWEN_MAX_WINDOW_LAYERS = 28  # what Transformers assumes where config.json is silent


def layer_windows(config: ModelConfig) -> list[int | None]:
    """Sliding window of each layer in tokens, None for full attention.

    Qwen's configs let only some layers slide (`layer_types`, or those from `max_window_layers` on);
    elsewhere all layers do if one does.
    """
    window = config.sliding_window
    if (
        window is None
        or not config.architecture.startswith("Qwen")
        or "use_sliding_window" not in config.extra
    ):
        return [window] * config.num_layers
    types = config.extra.get("layer_types")
    if types:
        return [window if kind == "sliding_attention" else None for kind in types]
    first = config.extra.get("max_window_layers", _QWEN_MAX_WINDOW_LAYERS)
    return [window if layer >= first else None for layer in range(config.num_layers)]


def group_layers(windows: list[int | None], fmt: KVFormat) -> list[KVGroup]:
    """The groups of layers with these windows.

    Layers of both kinds in one model share one group that keeps the whole context: sliding layers
    still see their window only, but free no block early.
    """
    window = windows[0] if len(set(windows)) == 1 else None
    if window is not None:
        name = f"sliding_{window}"
    else:
        # The name enters the block keys, and values depend on which layers slide.
        name = "_".join(["full", *(f"{layer}.sliding.{w}" for layer, w in enumerate(windows) if w)])
    return [KVGroup(name, tuple(range(len(windows))), fmt, window)]


def kv_groups(config: ModelConfig, dtype: str, block_size: int, tp_size: int = 1) -> list[KVGroup]:
    """KV groups of one of `tp_size` ranks, from the config alone (a built model's `kv_groups()` agrees).

    Args:
        config: the model.
        dtype: of the KV cache ("float32", "bfloat16", "float16").
        block_size: tokens per block.
        tp_size: tensor-parallel ranks.
    """
    fmt = KVFormat(dtype, block_size, max(1, config.num_kv_heads // tp_size), config.head_dim)
    return group_layers(layer_windows(config), fmt)
