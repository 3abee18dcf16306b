"""DeepSeek-V2 and V3: latent attention, and a mixture of experts with shared ones after the first layers.

arXiv 2405.04434 (V2, Lite without compressed queries) and 2412.19437 (V3: sigmoid routing with a
correction bias). The config says which variant it is; attention lies in `octavo.layers.latent_attention`,
routing in `octavo.layers.router`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.layers.attention import AttentionMetadata
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.latent_attention_linear import LatentDownLinear, LatentQueryLinear, LatentUpProjection
from octavo.layers.layer import LoadTarget
from octavo.layers.linear import RowParallelLinear
from octavo.layers.moe import MoE
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.sublayer import Sublayer
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from octavo.models.targets import Targets, left_out

_LATENT_EPS = 1e-6  # of the norms of compressed queries and KV, whatever the config's rms_norm_eps


class DeepseekAttention(Sublayer):
    """Multi-head latent self-attention."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding):
        super().__init__()
        latent = config.latent
        assert latent is not None and config.attention_scale is not None
        hidden, heads, interleaved = config.hidden_size, config.num_heads, latent.interleaved
        self._sizes = [latent.q_rank or 0, latent.kv_rank + latent.rope_dim]
        self.down_proj = LatentDownLinear(hidden, latent, config.attention_bias, interleaved)
        if latent.q_rank is None:
            self.q_proj = LatentQueryLinear(hidden, heads, latent, interleaved)
        else:
            self.q_a_layernorm = RMSNorm(latent.q_rank, _LATENT_EPS)
            self.q_b_proj = LatentQueryLinear(latent.q_rank, heads, latent, interleaved)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, _LATENT_EPS)
        self.kv_b_proj = LatentUpProjection(heads, latent)
        scale = config.attention_scale
        self.attn = LatentAttention(heads, latent, rotary, self.kv_a_layernorm, self.kv_b_proj, scale)
        self.o_proj = RowParallelLinear(heads * latent.value_dim, hidden, bias=config.attention_out_bias)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, meta: Sequence[AttentionMetadata]
    ) -> torch.Tensor:
        compressed, kv = self.down_proj(x).split(self._sizes, dim=-1)
        q = self.q_b_proj(self.q_a_layernorm(compressed)) if self._sizes[0] else self.q_proj(x)
        return self.o_proj(self.attn(q, kv, positions, cache, meta))

    def leave_sums(self) -> None:
        self.o_proj.reduce_results = False


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Latent attention, and experts in the layers that have them."""

    def attention(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding) -> Sublayer:
        return DeepseekAttention(config, rotary)

    def feed_forward(self, config: ModelConfig, layer: int) -> Sublayer:
        if config.moe is None or layer not in config.moe.layers:
            return LlamaMLP(config)
        return MoE(config.hidden_size, config.moe, config.hidden_act, float32_router=True)


class DeepseekForCausalLM(LlamaForCausalLM):
    """The decoder with its output head."""

    decoder_layer = DeepseekDecoderLayer

    def checkpoint_targets(self, targets: dict[str, LoadTarget]) -> Targets:
        """The layers that predict further tokens (V3, section 2.2) come after the last, and are not run."""
        first, extra = self.config.num_layers, int(self.config.extra.get("num_nextn_predict_layers") or 0)
        for layer in range(first, first + extra):
            targets = targets | left_out(f"model.layers.{layer}")
        return super().checkpoint_targets(targets)
