"""Sizes that a config may state: refused before a model is built from them, let alone allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models.config import ModelConfig

_MOST_LAYERS = 1024  # each costs a millisecond and some Python objects before its size is known
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "block_count")
_MOST_EXPERTS = 1 << 16
_MOST_ELEMENTS = 1 << 46  # of one matrix, 128 TiB in bfloat16; what PyTorch counts overflows at 2^63 bytes


def check_layers(raw: Mapping[str, Any], where: str) -> None:
    """Refuse a raw config (of Hugging Face or GGUF) with more layers than any model: readers of configs
    make lists of that length.

    Raises:
        ModelError: names the key.
    """
    for key, value in raw.items():
        if isinstance(value, Mapping):
            check_layers(value, where)
        elif key.rpartition(".")[2] in _LAYER_KEYS and isinstance(value, (int, float)):
            if value > _MOST_LAYERS:
                raise ModelError(
                    f"{where}: {key}={value} is more than any model's {_MOST_LAYERS}: fetch it again"
                )


def check_sizes(config: ModelConfig) -> None:
    """Refuse sizes that no model has, by arithmetic alone.

    Raises:
        ModelError: names the size, or the matrix that it makes.
    """
    for what, number, most in (
        ("num_hidden_layers", config.num_layers, _MOST_LAYERS),
        ("num_experts", config.moe.num_experts if config.moe else 0, _MOST_EXPERTS),
    ):
        if number > most:
            raise ModelError(f"{what}={number} is more than any model's {most}: fetch the config again")
    heads = max(config.num_heads, config.num_kv_heads)
    matrices = {
        "embedding, vocab_size x hidden_size": (config.vocab_size, config.hidden_size),
        "query projection, heads x head_dim x hidden_size": (heads, config.head_dim, config.hidden_size),
        "feed-forward, intermediate_size x hidden_size": (config.intermediate_size, config.hidden_size),
        "rotary table, max_position_embeddings x head_dim": (config.context_length, config.head_dim),
    }
    if config.moe is not None:
        experts = (config.moe.num_experts, config.moe.expert_size, config.hidden_size)
        matrices["experts, num_experts x expert size x hidden_size"] = experts
        matrices["shared expert, its size x hidden_size"] = (config.moe.shared_size, config.hidden_size)
    if config.latent is not None:
        ranks = (config.latent.kv_rank + config.latent.rope_dim, config.latent.q_rank or 0)
        matrices["latent projections, rank x hidden_size"] = (max(ranks), config.hidden_size)
        wide = max(config.latent.nope_dim + config.latent.rope_dim, config.latent.value_dim)
        matrices["latent heads, heads x dim x hidden_size"] = (heads, wide, config.hidden_size)
    for what, sizes in matrices.items():
        elements = 1
        for size in sizes:
            elements *= size
        if elements > _MOST_ELEMENTS:
            shown = " x ".join(map(str, sizes))
            raise ModelError(
                f"the config asks for {shown} elements ({what}), more than any memory: fetch it again"
            )
