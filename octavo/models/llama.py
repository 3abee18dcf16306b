"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Phi-3 and 4, Qwen2 (biases), Qwen3 (q and k norms).

A pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU feed-forward
(arXiv 2302.13971, 2310.06825, 2404.14219, 2407.10671, 2505.09388). The config says which variant it is. The
residual stream travels beside the hidden states, so that each addition fuses with the next norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from octavo.kernels import ops
from octavo.layers.activation import gated_activation
from octavo.layers.attention import AttentionMetadata
from octavo.layers.attention_layer import Attention
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.sublayer import DecoderLayer, Sublayer
from octavo.models.config import ModelConfig
from octavo.models.interface import CausalLM
from octavo.quantization.linear_method import AddingNorm


def rms_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """The model's norm over `size` elements; None: over the hidden size."""
    return RMSNorm(size or config.hidden_size, config.rms_norm_eps, config.norm_offset)


class LlamaAttention(Sublayer):
    """Grouped-query self-attention.

    Args:
        config: the model's.
        layer: index of the layer.
        rotary: its positions.
    """

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, heads, kv_heads, bias=config.attention_bias
        )
        self.q_norm = rms_norm(config, head_dim) if config.qk_norm else None
        self.k_norm = rms_norm(config, head_dim) if config.qk_norm else None
        self.attn = Attention(
            heads,
            kv_heads,
            head_dim,
            rotary,
            self.q_norm,
            self.k_norm,
            sliding_window=config.layer_windows[layer],
            scale=config.attention_scale,
            softcap=config.attention_softcap,
        )
        self.o_proj = RowParallelLinear(heads * head_dim, config.hidden_size, bias=config.attention_out_bias)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, meta: Sequence[AttentionMetadata]
    ) -> torch.Tensor:
        return self.attend(*self.qkv_proj.split(x), positions, cache, meta)

    def after(
        self, norm: AddingNorm, x: torch.Tensor, residual: torch.Tensor | None, *inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        product, residual = self.qkv_proj.after(norm, x, residual)
        return self.attend(*self.qkv_proj.heads(product), *inputs), residual

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """From projected heads (`[rows, heads, head_dim]`) to what is added to the stream."""
        return self.o_proj(self.attn(q, k, v, positions, cache, meta))

    def leave_sums(self) -> None:
        self.o_proj.reduce_results = False


class LlamaMLP(Sublayer):
    """Gated feed-forward (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias=config.mlp_bias)
        self.act = gated_activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.down_proj.takes_gates(x):
            return self.down_proj.of_gates(self.act, self.gate_up_proj(x))
        return self.down_proj(self.gate_up_proj.gated(self.act, x))

    def after(
        self, norm: AddingNorm, x: torch.Tensor, residual: torch.Tensor | None, *inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.down_proj.takes_gates(x):
            gates, residual = self.gate_up_proj.after(norm, x, residual)
            return self.down_proj.of_gates(self.act, gates), residual
        x, residual = self.gate_up_proj.after(norm, x, residual, self.act)
        return self.down_proj(x), residual

    def leave_sums(self) -> None:
        self.down_proj.reduce_results = False


class LlamaDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normalized before and added to the stream.

    A family that differs overrides `attention` or `feed_forward`, which make the two, or `forward`; one that
    does something to a sublayer's result before it is added needs it whole (`leaves_sums = False`).
    """

    leaves_sums = True

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__()
        self.input_layernorm = rms_norm(config)
        self.self_attn = self.attention(config, layer, rotary)
        self.post_attention_layernorm = rms_norm(config)
        self.mlp = self.feed_forward(config, layer)
        if self.leaves_sums:
            self.self_attn.leave_sums()
            self.mlp.leave_sums()
            self.input_layernorm.sums = self.post_attention_layernorm.sums = True

    def attention(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding) -> Sublayer:
        """The attention of a layer."""
        return LlamaAttention(config, layer, rotary)

    def feed_forward(self, config: ModelConfig, layer: int) -> Sublayer:
        """The feed-forward of a layer: `[rows, hidden_size]` to the same."""
        return LlamaMLP(config)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn.after(self.input_layernorm, x, residual, positions, cache, meta)
        x, residual = self.narrow(x, meta), self.narrow(residual, meta)
        return self.mlp.after(self.post_attention_layernorm, x, residual)


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm; `decoder_layer` is the family's."""

    def __init__(self, config: ModelConfig, decoder_layer: type[DecoderLayer] = LlamaDecoderLayer):
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        positions = config.max_position_embeddings
        self.rotary_emb = RotaryEmbedding(config.rope, positions)
        self.rotary_emb_local = RotaryEmbedding(config.local_rope, positions) if config.local_rope else None
        local = self.rotary_emb_local or self.rotary_emb
        self.layers = nn.ModuleList(
            decoder_layer(config, layer, self.rotary_emb if window is None else local)
            for layer, window in enumerate(config.layer_windows)
        )
        self.layers[-1].is_last = True  # type: ignore[assignment]
        self.norm: RMSNorm | LayerNorm = rms_norm(config)
        self.norm.sums = decoder_layer.leaves_sums

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: Sequence[AttentionMetadata],
        keep: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states after the final norm, and the stream as it enters the layers `keep`."""
        x = self.embed_tokens(token_ids)
        residual: torch.Tensor | None = None
        kept: list[torch.Tensor] = []
        for number, (layer, cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            if number in keep:  # a copy: layers add to the stream in place
                kept.append(x.clone() if residual is None else self.norm.summed(x) + residual)
            x, residual = layer(x, residual, positions, cache, meta)
        if len(self.layers) in keep:
            kept.append(x if residual is None else self.norm.summed(x) + residual)
        return self.norm.add(x, residual)[0], kept


class LlamaForCausalLM(CausalLM):
    """The decoder with its output head; `decoder_layer` is the family's."""

    decoder_layer: type[DecoderLayer] = LlamaDecoderLayer
    narrows = True
    gives_states = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, self.decoder_layer)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, tied_to)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        hidden, self.aux_states = self.model(token_ids, positions, kv_caches, meta, self.aux_layers)
        return hidden

    def embedding(self) -> VocabEmbedding:
        return self.model.embed_tokens

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head.local(hidden)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.logit_softcap is not None:
            logits = ops.softcap(logits, self.config.logit_softcap)
        return logits

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        return self.lm_head.gather(local)

    def likeliest(self, local: torch.Tensor) -> torch.Tensor:
        return self.lm_head.argmax(local)
