"""The tiny models there are: for each its family, its config, and the seed of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np

CONTEXT = 256
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 384
BOS, EOS = 1, 2

# Longer than longrope's original context (below), where Transformers chooses by each forward's length.
PROMPTS: list[list[int]] = [
    np.random.default_rng(length).integers(len(SPECIAL_TOKENS), VOCAB_SIZE, length).tolist()
    for length in (6, 41, 100)
]

BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=BOS,
    eos_token_id=EOS,
)
_FACTORS = {
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "factor": 4.0,
    "rope_theta": 10000.0,
    "rope_type": "longrope",
}


def _rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **params}}


_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "tie_word_embeddings": True,
    "sliding_window": 21,
    "pad_token_id": 0,
}

_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

# Class prefix in Transformers, changes to the base, seed of the weights.
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {}, 0),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, 0),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, 3),
    "linear": ("Llama", _rope("linear", factor=2.0), 0),
    "llama3": (
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        1,
    ),
    "yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64), 2),
    "dynamic": ("Llama", _rope("dynamic", factor=2.0), 0),
    "longrope-short": (
        "Llama",
        {"rope_parameters": {**_FACTORS, "original_max_position_embeddings": CONTEXT}},
        0,
    ),
    "longrope": ("Llama", {"rope_parameters": {**_FACTORS, "original_max_position_embeddings": 4}}, 0),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}, 0),
    "qwen2": ("Qwen2", {}, 0),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}, 73),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
        6,
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}, 1),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, 151),
    "mistral-window": ("Mistral", {"sliding_window": 21, "head_dim": 32}, 0),
    "phi3": ("Phi3", {"pad_token_id": 0, **_rope("default", partial_rotary_factor=0.5)}, 3),
    "phi3-window": ("Phi3", {"pad_token_id": 0, "sliding_window": 21}, 1),
    # As Phi-4-mini: tied, a part of each head turned, two sets of factors.
    "phi3-longrope": (
        "Phi3",
        {
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                **_FACTORS,
                "short_factor": _FACTORS["short_factor"][:6],
                "long_factor": _FACTORS["long_factor"][:6],
                "partial_rotary_factor": 0.75,
            },
        },
        0,
    ),
    "gemma2": (
        "Gemma2",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
        },
        7,
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 32,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        0,
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.8,
        },
        0,
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 0}, 6),
    "olmo3": (
        "Olmo3",
        {
            "pad_token_id": 0,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.2,
                    "rope_theta": 10000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        0,
    ),
    # As 3B, 2-1.6B and 2-12B.
    "stablelm": ("StableLm", {"layer_norm_eps": 1e-3}, 16),
    "stablelm-biases": ("StableLm", {"num_key_value_heads": 4, "use_qkv_bias": True}, 65),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}, 6),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 0),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 32}, 0),
    "qwen3-moe-mixed": ("Qwen3Moe", {**_EXPERTS, "mlp_only_layers": [0]}, 0),
    "qwen3-moe-sparse": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 2}, 0),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}, 0),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 80}, 1),
    # As V2-Lite, but for its two mscales, which are equal there.
    "deepseek-v2-lite": (
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.8, mscale_all_dim=0.7),
        },
        1,
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7),
        },
        0,
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**_DEEPSEEK, "q_lora_rank": 24, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
        1,
    ),
}
