"""What each architecture fixes that its config.json leaves unsaid, and how its own keys are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.models.config import ModelConfig

_QWEN_MAX_WINDOW_LAYERS = 28  # what Transformers assumes where config.json is silent


def _full_attention(raw: dict[str, Any]) -> list[int | None]:
    return []


@dataclass(frozen=True)
class Family:
    """How one architecture's config.json is read beyond what all have in common.

    Attributes:
        default_theta: rotary base where the file is silent.
        qk_norm: whether queries and keys are normalized.
        head_dim: size of a head where the file is silent; None: hidden size over heads.
        biases: from the raw config: biases of q, k, v; of the attention's output; of the MLP.
        windows: from the raw config: each layer's sliding window, None where it sees all; [] if none has.
        refine: last changes to the normal form, from it and the raw config.
    """

    default_theta: float = 10000.0
    qk_norm: bool = False
    head_dim: int | None = None
    biases: Callable[[dict[str, Any]], tuple[bool, bool, bool]] = lambda raw: (False, False, False)
    windows: Callable[[dict[str, Any]], list[int | None]] = _full_attention
    refine: Callable[[ModelConfig, dict[str, Any]], ModelConfig] = lambda config, raw: config


def _llama_biases(raw: dict[str, Any]) -> tuple[bool, bool, bool]:
    attention = bool(raw.get("attention_bias", False))
    return attention, attention, bool(raw.get("mlp_bias", False))


def _qwen3_biases(raw: dict[str, Any]) -> tuple[bool, bool, bool]:
    attention = bool(raw.get("attention_bias", False))
    return attention, attention, False


def every_layer(raw: dict[str, Any], default: int | None) -> list[int | None]:
    """The windows of a model whose layers all slide if one does; `default` where the key is absent."""
    window = raw.get("sliding_window", default)
    return [] if window is None else [int(window)] * int(raw["num_hidden_layers"])


def by_layer_type(types: list[str], window: Any) -> list[int | None]:
    """The windows that `layer_types` gives."""
    return [int(window) if kind == "sliding_attention" else None for kind in types]


def _qwen_windows(raw: dict[str, Any]) -> list[int | None]:
    """Qwen slides only under `use_sliding_window`, and only in layers from `max_window_layers` on."""
    window = raw.get("sliding_window", 4096)
    if not raw.get("use_sliding_window", False) or window is None:
        return []
    if raw.get("layer_types"):
        return by_layer_type(raw["layer_types"], window)
    first = int(raw.get("max_window_layers", _QWEN_MAX_WINDOW_LAYERS))
    return [int(window) if layer >= first else None for layer in range(int(raw["num_hidden_layers"]))]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(biases=_llama_biases),
    "MistralForCausalLM": Family(windows=lambda raw: every_layer(raw, 4096)),
    "Qwen2ForCausalLM": Family(biases=lambda raw: (True, False, False), windows=_qwen_windows),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128, biases=_qwen3_biases, windows=_qwen_windows),
}
