"""A model's architecture in one normal form, whatever file it was read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
class MoEConfig:
    """A mixture of experts in place of the feed-forward (arXiv 1701.06538, 2401.04088, 2412.19437).

    Attributes:
        num_experts, top_k: routed experts, and how many of them a token visits.
        expert_size: inner size of one routed expert.
        layers: indexes of the layers that have experts; the others have a dense feed-forward.
        shared_size: inner size of the expert that every token visits; 0: none.
        scoring: "softmax" or "sigmoid" of the router's logits.
        renormalize: whether the chosen weights are divided by their sum.
        scale: factor of the chosen weights.
        correction_bias: whether a learned bias is added to the scores for the choice alone.
        num_groups, top_groups: experts lie in groups, of which a token visits only so many (1, 1: no
            groups).
        group_score: how a group is judged: by its "max" score, or the sum of its two best ("top2").
    """

    num_experts: int
    top_k: int
    expert_size: int
    layers: tuple[int, ...]
    shared_size: int = 0
    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): sizes in elements.

    `q_rank` is None where queries are not compressed. `interleaved`: the checkpoint's rotary pairs are
    neighbours, as DeepSeek's are.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """What a family file needs to build a decoder. Sizes in elements, nothing about placement.

    `architecture` is the Hugging Face class name (`LlamaForCausalLM`); `dtype` the checkpoint's own
    ("float32", "bfloat16", "float16"). `windows` has each layer's sliding window in tokens (itself
    included), None where it sees everything; empty: all layers do. `local_rope` is that of the layers
    with a window where it differs. `extra` keeps the raw config for families with more to read.
    `implementation` is "octavo", or for models that run Transformers' code "transformers" (decoders) or
    "encoder" (models whose tokens see both sides, for embeddings alone).
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
    rms_norm_eps: float  # of layer norms, too
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    dtype: str = "bfloat16"
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # biases of q, k, v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0  # added to the stored weights of norms (Gemma: 1)
    windows: tuple[int | None, ...] = ()
    parallel_residual: bool = False  # attention and feed-forward take one norm and are added at once
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each sublayer adds to the stream
    logit_scale: float = 1.0
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    implementation: str = "octavo"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens, None for full attention."""
        return self.windows or (None,) * self.num_layers

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

    def with_windows(self, windows: Sequence[int | None]) -> ModelConfig:
        """The same with these sliding windows, without those that hide nothing of the context.

        Where layers with a window have positions of their own, every window is kept: it also says so.
        """
        if self.local_rope is None:
            windows = [w if w is not None and w < self.context_length else None for w in windows]
        return replace(self, windows=tuple(windows) if any(windows) else ())
