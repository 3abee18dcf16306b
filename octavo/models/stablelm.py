"""StableLM 3B and StableLM 2 (Stability AI, arXiv 2402.17834).

Llama's decoder with layer norms instead of RMS norms. StableLM 2 12B adds attention and feed-forward of one
norm at once, and normalizes each head of q and k by weights of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.attention import AttentionMetadata
from octavo.layers.layer import BuildContext, Layer, LoadTarget, empty_parameter
from octavo.layers.linear import QKVParallelLinear
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.sublayer import DecoderLayer
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP


def layer_norm(config: ModelConfig) -> LayerNorm:
    """A norm of the residual stream."""
    return LayerNorm(config.hidden_size, config.rms_norm_eps)


class PerHeadLayerNorm(Layer):
    """Layer norm of every head of one part of `qkv`, by a weight for each, without bias.

    `[rows, local heads, head_dim]` to the same. Checkpoints hold the heads' weights apart
    (`norms.0.weight`), GGUF files stacked.
    """

    weight: nn.Parameter

    def __init__(self, qkv: QKVParallelLinear, part: str, eps: float):
        super().__init__()
        self.part = part
        self.eps = eps
        self.head_dim = qkv.head_dim
        self.num_heads = qkv.parts[part] // qkv.head_dim
        # In a tuple, so that the projection is not registered (and named) a second time.
        self._qkv = (qkv,)

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        # The projection was registered, and so built, before this norm.
        (qkv,) = self._qkv
        first, rows = qkv.part_rows(self.part)
        self.heads = range(first // self.head_dim, (first + rows) // self.head_dim)
        self.weight = empty_parameter(len(self.heads), self.head_dim, build=build)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        targets = {
            f"{prefix}.norms.{head}.weight": LoadTarget((self.head_dim,), partial(self._load_head, head))
            for head in range(self.num_heads)
        }
        stacked = LoadTarget((self.num_heads, self.head_dim), self._load_stacked, covers=tuple(targets))
        return {**targets, f"{prefix}.weight": stacked}

    def _load_head(self, head: int, tensor: torch.Tensor) -> None:
        if head in self.heads:
            self.weight[head - self.heads.start].copy_(tensor)

    def _load_stacked(self, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor[self.heads.start : self.heads.stop])

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        # The product in float32, so that it is rounded once.
        normal = F.layer_norm(heads.float(), (self.head_dim,), eps=self.eps)
        return (normal * self.weight).to(heads.dtype)


class StableLmAttention(LlamaAttention):
    """Grouped-query self-attention, in the 12B model with layer norms of q's and k's heads."""

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__(replace(config, qk_norm=False), layer, rotary)
        self.q_layernorm: nn.Module = nn.Identity()
        self.k_layernorm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_layernorm = PerHeadLayerNorm(self.qkv_proj, "q_proj", config.rms_norm_eps)
            self.k_layernorm = PerHeadLayerNorm(self.qkv_proj, "k_proj", config.rms_norm_eps)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        return super().attend(self.q_layernorm(q), self.k_layernorm(k), v, positions, cache, meta)


class StableLmDecoderLayer(DecoderLayer):
    """Attention and feed-forward, one after the other or, under `parallel_residual`, beside each other."""

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__()
        self.input_layernorm = layer_norm(config)
        self.self_attn = StableLmAttention(config, layer, rotary)
        self.post_attention_layernorm = None if config.parallel_residual else layer_norm(config)
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
        attended = self.narrow(self.self_attn(x, positions, cache, meta), meta)
        residual = self.narrow(residual, meta)
        if self.post_attention_layernorm is None:
            return attended + self.mlp(self.narrow(x, meta)), residual
        x, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(x), residual


class StableLmForCausalLM(LlamaForCausalLM):
    """StableLM 3B, or StableLM 2."""

    decoder_layer = StableLmDecoderLayer

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.model.norm = layer_norm(config)
