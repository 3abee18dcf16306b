"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and 2.5 (biases), Qwen3 (q and k norms).

A pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU feed-forward
(arXiv 2302.13971, 2310.06825, 2407.10671, 2505.09388). The config says which variant it is. The
residual stream travels beside the hidden states, so that each addition fuses with the next norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from octavo.layers.activation import gated_activation
from octavo.layers.attention import AttentionMetadata
from octavo.layers.attention_layer import Attention
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.config import ModelConfig
from octavo.models.interface import CausalLM


class LlamaAttention(nn.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, window: int | None):
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, heads, kv_heads, bias=config.attention_bias
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.attn = Attention(
            heads, kv_heads, head_dim, rotary, self.q_norm, self.k_norm, window, config.attention_scale
        )
        self.o_proj = RowParallelLinear(heads * head_dim, config.hidden_size, bias=config.attention_out_bias)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, meta: Sequence[AttentionMetadata]
    ) -> torch.Tensor:
        q, k, v = self.qkv_proj.split(x)
        return self.o_proj(self.attn(q, k, v, positions, cache, meta))


class LlamaMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias=config.mlp_bias)
        self.act = gated_activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each normalized before and added to the stream."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, window: int | None):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, rotary, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, positions, cache, meta)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_position_embeddings)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, self.rotary_emb, window) for window in config.layer_windows
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        x = self.embed_tokens(token_ids)
        residual: torch.Tensor | None = None
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, positions, cache, meta)
        return self.norm.add(x, residual)[0]


class LlamaForCausalLM(CausalLM):
    """The decoder with its output head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, tied_to)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        return self.model(token_ids, positions, kv_caches, meta)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)
