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
    "mistral-window": ("Mistral", {"sliding_window": 21, "head_dim": 32}, 0),
    "qwen2": ("Qwen2", {}, 0),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}, 73),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
        6,
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}, 1),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, 151),
}
