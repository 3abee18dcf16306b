"""A model's architecture in one normal form, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and scaling, as Hugging Face's `rope_parameters`.

    `kind` is one of default, linear, llama3, yarn, dynamic, longrope; `params` holds that kind's
    own numbers under Hugging Face's names (factor, low_freq_factor, beta_fast, attention_factor, …);
    for every kind but default and linear, `original_max_position_embeddings` is always among them.
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
    ("float32", "bfloat16", "float16"). `sliding_window` is set only where it narrows what a layer
    sees. `extra` keeps the raw config for families with more to read.
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

    @property
    def context_length(self) -> int:
        """Longest context in tokens that the positions reach, scaling included.

        `max_position_embeddings` states the scaled length for llama3 and longrope, and the length
        before scaling for linear and dynamic; yarn has both numbers and `factor` between them (the
        rule that vLLM follows).
        """
        factor = float(self.rope.params.get("factor", 1.0))
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * factor)
        if self.rope.kind == "yarn":
            original = int(self.rope.params["original_max_position_embeddings"])
            return max(self.max_position_embeddings, int(original * factor))
        return self.max_position_embeddings


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a dense decoder, under Hugging Face's names.

    A tied model has no `lm_head.weight`: its output matrix is `model.embed_tokens.weight`.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q, config.attention_out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
