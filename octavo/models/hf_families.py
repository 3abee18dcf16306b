"""What each architecture fixes that its config.json leaves unsaid, and how its own keys are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.models.config import ModelConfig


def _full_attention(raw: dict[str, Any]) -> list[int | None]:
    return []


@dataclass(frozen=True)
class Family:
    """How one architecture's config.json is read beyond what all have in common.

    Attributes:
        defaults: the values of keys that the file leaves out, as Transformers' config class fills them
            in; a key that is there with null counts as given.
        qk_norm: whether queries and keys are normalized.
        norm_offset: what is added to the stored weights of norms.
        biases: from the raw config: biases of q, k, v; of the attention's output; of the MLP.
        windows: from the raw config: each layer's sliding window, None where it sees all; [] if none has.
        local_theta: from the raw config: rotary base of the layers that slide, in a family where they
            have positions of their own; None: all layers share them.
        refine: last changes to the normal form, from it and the raw config.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qk_norm: bool = False
    norm_offset: float = 0.0
    biases: Callable[[dict[str, Any]], tuple[bool, bool, bool]] = lambda raw: (False, False, False)
    windows: Callable[[dict[str, Any]], list[int | None]] = _full_attention
    local_theta: Callable[[dict[str, Any]], Any] | None = None
    refine: Callable[[ModelConfig, dict[str, Any]], ModelConfig] = lambda config, raw: config


def _llama_biases(raw: dict[str, Any]) -> tuple[bool, bool, bool]:
    attention = bool(raw.get("attention_bias", False))
    return attention, attention, bool(raw.get("mlp_bias", False))


def _qwen3_biases(raw: dict[str, Any]) -> tuple[bool, bool, bool]:
    attention = bool(raw.get("attention_bias", False))
    return attention, attention, False


def every_layer(raw: dict[str, Any]) -> list[int | None]:
    """The windows of a model whose layers all slide if one does."""
    window = raw.get("sliding_window")
    return [] if window is None else [int(window)] * int(raw["num_hidden_layers"])


def by_layer_type(raw: dict[str, Any], types: list[str] | None = None) -> list[int | None]:
    """The windows that `layer_types` (or `types`) gives."""
    window = raw.get("sliding_window")
    if window is None:
        return []
    types = raw["layer_types"] if types is None else types
    return [int(window) if kind == "sliding_attention" else None for kind in types]


def every_nth_full(raw: dict[str, Any], n: int) -> list[int | None]:
    """The windows that `layer_types` gives, or else those of a model whose every `n`-th layer sees all."""
    types = raw.get("layer_types")
    if types is None:
        layers = range(1, int(raw["num_hidden_layers"]) + 1)
        types = ["sliding_attention" if layer % n else "full_attention" for layer in layers]
    return by_layer_type(raw, types)


def _qwen_windows(raw: dict[str, Any]) -> list[int | None]:
    """Qwen slides only under `use_sliding_window`, and only in layers from `max_window_layers` on."""
    window = raw.get("sliding_window")
    if not raw.get("use_sliding_window", False) or window is None:
        return []
    if raw.get("layer_types"):
        return by_layer_type(raw)
    first = int(raw["max_window_layers"])
    return [int(window) if layer >= first else None for layer in range(int(raw["num_hidden_layers"]))]


_QWEN = {"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family({"max_position_embeddings": 2048}, biases=_llama_biases),
    "MistralForCausalLM": Family(
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        windows=every_layer,
    ),
    "Qwen2ForCausalLM": Family(
        {**_QWEN, "num_key_value_heads": 32}, biases=lambda raw: (True, False, False), windows=_qwen_windows
    ),
    "Qwen3ForCausalLM": Family(
        {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
        qk_norm=True,
        biases=_qwen3_biases,
        windows=_qwen_windows,
    ),
}
