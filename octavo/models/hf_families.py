"""What each architecture fixes that its config.json leaves unsaid, and how its own keys are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.deepseek_config import V2_DEFAULTS, V3_DEFAULTS, deepseek_v2, deepseek_v3
from octavo.models.moe_config import mixtral_moe, olmoe_moe, qwen_moe


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
        partial_rotary: whether `partial_rotary_factor` is heeded; Transformers' code of other families takes
            no notice of it.
        refine: last changes to the normal form, from it and the raw config.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qk_norm: bool = False
    norm_offset: float = 0.0
    biases: Callable[[dict[str, Any]], tuple[bool, bool, bool]] = lambda raw: (False, False, False)
    windows: Callable[[dict[str, Any]], list[int | None]] = _full_attention
    local_theta: Callable[[dict[str, Any]], Any] | None = None
    partial_rotary: bool = False
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


def _qwen2_moe_windows(raw: dict[str, Any]) -> list[int | None]:
    """Under `use_sliding_window` every other layer below `max_window_layers` slides."""
    if not raw.get("use_sliding_window", False):
        return []
    if raw.get("layer_types"):
        return by_layer_type(raw)
    below = int(raw["max_window_layers"])
    layers = range(int(raw["num_hidden_layers"]))
    return [int(raw["sliding_window"]) if i % 2 == 0 and i < below else None for i in layers]


def _number(raw: dict[str, Any], key: str) -> float | None:
    """A factor or bound, None where it is null or 0."""
    value = raw.get(key)
    if isinstance(value, bool) or not (value is None or isinstance(value, (int, float))):
        raise ValueError(f"{key}={value!r} is not a number")
    return float(value) if value else None


def _gemma2(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    return replace(
        config,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=_number(raw, "attn_logit_softcapping"),
        logit_softcap=_number(raw, "final_logit_softcapping"),
    )


def scaled_positions(config: ModelConfig) -> ModelConfig:
    """For files (Gemma 3's) that state the length after linear scaling, not before it like others."""
    if config.rope.kind != "linear":
        return config
    before = max(1, int(config.max_position_embeddings / config.rope.params["factor"]))
    return replace(config, max_position_embeddings=before)


def _gemma3(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    # Its attn_logit_softcapping is not heeded, as in Transformers.
    return scaled_positions(replace(_gemma2(config, raw), attention_softcap=None))


def _granite(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    return replace(
        config,
        embedding_scale=float(raw["embedding_multiplier"]),
        attention_scale=float(raw["attention_multiplier"]),
        residual_scale=float(raw["residual_multiplier"]),
        logit_scale=1.0 / float(raw["logits_scaling"]),
    )


def _stablelm(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    if config.head_dim * config.num_heads != config.hidden_size:  # which Transformers' code takes for granted
        raise ValueError(
            f"hidden_size={config.hidden_size} is not that of {config.num_heads} heads of {config.head_dim}"
        )
    return replace(
        config,
        rms_norm_eps=float(raw["layer_norm_eps"]),
        qk_norm=bool(raw["qk_layernorm"]),
        parallel_residual=bool(raw["use_parallel_residual"]),
    )


_GEMMA2 = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
# All of them: the text config of a multimodal checkpoint says hardly more than how it differs.
_GEMMA3 = {
    **_GEMMA2,
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
}
_GEMMA3_FAMILY = Family(
    _GEMMA3,
    qk_norm=True,
    norm_offset=1.0,
    biases=_qwen3_biases,
    windows=lambda raw: every_nth_full(raw, int(raw["sliding_window_pattern"])),
    local_theta=lambda raw: raw["rope_local_base_freq"],
    refine=_gemma3,
)
_OLMO2 = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_GRANITE = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_STABLELM = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
}
_PHI3 = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_QWEN = {"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}
_MIXTRAL = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_OLMOE = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
_QWEN2_MOE = {
    **_QWEN,
    "num_key_value_heads": 16,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3_MOE = {
    **_QWEN,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}

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
    "Phi3ForCausalLM": Family(_PHI3, windows=every_layer, partial_rotary=True),
    "Gemma2ForCausalLM": Family(
        _GEMMA2,
        norm_offset=1.0,
        biases=_qwen3_biases,
        windows=lambda raw: every_nth_full(raw, 2),
        refine=_gemma2,
    ),
    "Gemma3ForCausalLM": _GEMMA3_FAMILY,
    "Gemma3ForConditionalGeneration": _GEMMA3_FAMILY,
    "GraniteForCausalLM": Family(_GRANITE, biases=_llama_biases, refine=_granite),
    "Olmo2ForCausalLM": Family(_OLMO2, qk_norm=True, biases=_qwen3_biases),
    "Olmo3ForCausalLM": Family(
        {**_OLMO2, "rope_theta": 500000.0, "sliding_window": 4096},
        qk_norm=True,
        biases=_qwen3_biases,
        windows=lambda raw: every_nth_full(raw, 4),
        local_theta=lambda raw: raw["rope_theta"],
    ),
    "StableLmForCausalLM": Family(
        _STABLELM,
        biases=lambda raw: (bool(raw["use_qkv_bias"]), False, False),
        partial_rotary=True,
        refine=_stablelm,
    ),
    "MixtralForCausalLM": Family(
        _MIXTRAL,
        windows=every_layer,
        refine=mixtral_moe,
    ),
    "OlmoeForCausalLM": Family(_OLMOE, qk_norm=True, biases=_qwen3_biases, refine=olmoe_moe),
    "Qwen2MoeForCausalLM": Family(
        _QWEN2_MOE,
        biases=lambda raw: (bool(raw.get("qkv_bias", True)), False, False),
        windows=_qwen2_moe_windows,
        refine=qwen_moe,
    ),
    "Qwen3MoeForCausalLM": Family(
        _QWEN3_MOE,
        qk_norm=True,
        biases=_qwen3_biases,
        windows=lambda raw: every_layer(raw) if raw.get("use_sliding_window") else [],
        refine=qwen_moe,
    ),
    "DeepseekV2ForCausalLM": Family(V2_DEFAULTS, biases=_qwen3_biases, refine=deepseek_v2),
    "DeepseekV3ForCausalLM": Family(V3_DEFAULTS, biases=_qwen3_biases, refine=deepseek_v3),
}
