"""A model's architecture in one normal form, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and scaling, as Hugging Face's `rope_parameters`.

    `kind` is one of default, linear, llama3, yarn, dynamic, longrope; `params` holds that kind's
    own numbers under Hugging Face's names (factor, low_freq_factor, beta_fast, attention_factor, …).
    `dim` is the rotated part of a head.
    """

    theta: float
    dim: int
    kind: str = "default"
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """What a family file needs to build a decoder. Sizes in elements, nothing about placement.

    `architecture` is the Hugging Face class name (`LlamaForCausalLM`); `dtype` the checkpoint's own
    ("float32", "bfloat16", "float16"). `extra` keeps the raw config for families with more to read.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    dtype: str = "bfloat16"
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # biases of q, k, v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
