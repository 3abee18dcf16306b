"""DeepSeek-V2 and V3 out of config.json and GGUF metadata: latent attention, experts, the scores' scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.models.config import LatentConfig, ModelConfig, MoEConfig, RopeConfig
from octavo.models.moe_config import with_experts

if TYPE_CHECKING:
    from octavo.models.gguf_file import GGUFFile

# What Transformers' config classes fill in for keys that config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": None,
}
V2_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "norm_topk_prob": False,
}
V3_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
# DeepSeek-V2's rules for the choice of experts: whether they lie in groups.
_V2_METHODS = {"greedy": False, "group_limited_greedy": True}


def _with_latent(config: ModelConfig, latent: LatentConfig, mscale_all_dim: float) -> ModelConfig:
    """The config with latent attention, and with the scale of its scores: under a scaled rotary embedding
    times the square of yarn's mscale, `0.1 mscale_all_dim ln(factor) + 1`, as Transformers does."""
    for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"):
        size = getattr(latent, name)
        if not (name == "q_rank" and size is None) and not 1 <= size < 1 << 31:
            raise ValueError(f"latent attention of {name} {size}")
    if latent.rope_dim % 2:
        raise ValueError(f"rope turns {latent.rope_dim} dimensions, not an even number")
    head_dim = latent.nope_dim + latent.rope_dim
    rope = replace(config.rope, dim=latent.rope_dim)
    mscale = 1.0
    if rope.kind != "default" and mscale_all_dim:
        mscale += 0.1 * mscale_all_dim * math.log(max(1.0, float(rope.params["factor"])))
    return replace(
        config,
        rope=rope,
        head_dim=head_dim,
        latent=latent,
        attention_scale=head_dim**-0.5 * mscale * mscale,
    )


def _latent(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    latent = LatentConfig(
        q_rank=None if raw["q_lora_rank"] is None else int(raw["q_lora_rank"]),
        kv_rank=int(raw["kv_lora_rank"]),
        nope_dim=int(raw["qk_nope_head_dim"]),
        rope_dim=int(raw["qk_rope_head_dim"]),
        value_dim=int(raw["v_head_dim"]),
        interleaved=bool(raw.get("rope_interleave", True)),
    )
    return _with_latent(config, latent, float(config.rope.params.get("mscale_all_dim") or 0.0))


def _experts(config: ModelConfig, raw: dict[str, Any]) -> MoEConfig:
    """What both versions say alike; a version has experts in every `moe_layer_freq`-th layer."""
    first, every = int(raw["first_k_dense_replace"]), int(raw.get("moe_layer_freq") or 1)
    if not 0 <= int(raw.get("num_nextn_predict_layers") or 0) <= config.num_layers:
        raise ValueError(f"num_nextn_predict_layers={raw['num_nextn_predict_layers']}")
    experts = int(raw.get("n_routed_experts") or 0)
    size = int(raw["moe_intermediate_size"])
    sparse = [layer for layer in range(first, config.num_layers) if layer % every == 0]
    return MoEConfig(
        num_experts=experts,
        top_k=int(raw.get("num_experts_per_tok") or 0),
        expert_size=size,
        layers=tuple(sparse) if experts else (),
        shared_size=int(raw.get("n_shared_experts") or 0) * size,
        scale=float(raw["routed_scaling_factor"]),
    )


def deepseek_v2(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    """Experts by softmax; in the large model only those of the groups with the best expert."""
    method = raw["topk_method"]
    if method not in _V2_METHODS or raw.get("scoring_func", "softmax") != "softmax":
        raise ModelError(
            f"topk_method={method!r} with scoring_func={raw.get('scoring_func')!r} is not supported for "
            "DeepSeek-V2: use a checkpoint with greedy or group_limited_greedy by softmax"
        )
    if raw["norm_topk_prob"]:
        raise ModelError(
            "norm_topk_prob=true is not supported for DeepSeek-V2, since implementations disagree on it: "
            "use a checkpoint without"
        )
    grouped = _V2_METHODS[method]
    moe = replace(
        _experts(config, raw),
        renormalize=False,
        num_groups=int(raw["n_group"]) if grouped else 1,
        top_groups=int(raw["topk_group"]) if grouped else 1,
    )
    return with_experts(_latent(config, raw), moe)


def deepseek_v3(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    """Experts by sigmoid, chosen with a learned bias from the groups whose two best are best."""
    method, scoring = raw.get("topk_method", "noaux_tc"), raw.get("scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise ModelError(
            f"topk_method={method!r} with scoring_func={scoring!r} is not supported for DeepSeek-V3: use a "
            "checkpoint with noaux_tc by sigmoid"
        )
    moe = replace(
        _experts(config, raw),
        scoring="sigmoid",
        renormalize=bool(raw["norm_topk_prob"]),
        correction_bias=True,
        num_groups=int(raw["n_group"]),
        top_groups=int(raw["topk_group"]),
        group_score="top2",
    )
    return with_experts(_latent(config, raw), moe)


# ---- GGUF -------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's expert_gating_func
# llama.cpp writes 0.1 mscale_all_dim: https://github.com/ggml-org/llama.cpp/pull/17945
_LOG_MULTIPLIER = 0.1


def _integer(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(f"{{arch}}.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{key}={value!r} is not a number of 31 bits")
    return value


def gguf_deepseek2(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """llama.cpp's "deepseek2", which is V2 and V3 alike: the gating function tells them apart.

    Files from before May 2025 have key and value lengths of the heads; newer ones say by these what the
    cache holds, and those of the heads under `_mla`. Files of 2025 and older say nothing of groups of
    experts; then a token chooses among all, as it does in llama.cpp.
    """
    key = _integer(file, "attention.key_length_mla", _integer(file, "attention.key_length"))
    value = _integer(file, "attention.value_length_mla", _integer(file, "attention.value_length"))
    rope_dim = _integer(file, "rope.dimension_count")
    q_rank = _integer(file, "attention.q_lora_rank", 0)
    latent = LatentConfig(
        q_rank=q_rank or None,
        kv_rank=_integer(file, "attention.kv_lora_rank"),
        nope_dim=key - rope_dim,
        rope_dim=rope_dim,
        value_dim=value,
    )
    rope = config.rope
    if rope.kind == "yarn":  # its cosines and sines are not scaled, the scores are
        rope = RopeConfig(rope.theta, rope.dim, rope.kind, {**rope.params, "attention_factor": 1.0})
    multiplier = float(file.get("{arch}.rope.scaling.yarn_log_multiplier", 0.0))
    config = _with_latent(
        replace(config, rope=rope, num_kv_heads=config.num_heads), latent, multiplier / _LOG_MULTIPLIER
    )
    gating = _integer(file, "expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ModelError(
            f"expert_gating_func={gating} is not supported: use a model that chooses experts by softmax "
            "(1) or sigmoid (2)"
        )
    first = _integer(file, "leading_dense_block_count", 0)
    size = _integer(file, "expert_feed_forward_length", 0)
    experts = _integer(file, "expert_count", 0)
    bias = f"blk.{first}.exp_probs_b.bias" in file.tensors
    v3 = bias or gating == _SIGMOID
    groups = _integer(file, "expert_group_count", 1)
    moe = MoEConfig(
        num_experts=experts,
        top_k=_integer(file, "expert_used_count", 0),
        expert_size=size,
        layers=tuple(range(first, config.num_layers)) if experts else (),
        shared_size=_integer(file, "expert_shared_count", 0) * size,
        scoring="sigmoid" if gating == _SIGMOID else "softmax",
        renormalize=bool(file.get("{arch}.expert_weights_norm", False)),
        scale=float(file.get("{arch}.expert_weights_scale", 1.0)),
        correction_bias=bias,
        num_groups=groups,
        top_groups=_integer(file, "expert_group_used_count", groups),
        group_score="top2" if v3 else "max",
    )
    return with_experts(replace(config, architecture=f"DeepseekV{3 if v3 else 2}ForCausalLM"), moe)
