"""OLMo 2 (arXiv 2501.00656) and OLMo 3 (the same, with windows in three of four layers).

Llama's decoder with its norms after the sublayers instead of before, and norms of q and k over the
whole projected width instead of single heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from octavo.kernels import ops
from octavo.layers.attention import AttentionMetadata
from octavo.layers.layer import BuildContext, Layer, LoadTarget
from octavo.layers.linear import QKVParallelLinear
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.sublayer import DecoderLayer
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, rms_norm


class HeadsNorm(Layer):
    """RMS norm over all heads of one part of `qkv`, those of other ranks included.

    `[rows, local heads, head_dim]` to the same.
    """

    weight: nn.Parameter

    def __init__(self, qkv: QKVParallelLinear, part: str, eps: float):
        super().__init__()
        self.eps = eps
        self.part = part
        # In a tuple, so that the projection is not registered (and named) a second time.
        self._qkv = (qkv,)

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        # The projection was registered, and so built, before this norm.
        (qkv,) = self._qkv
        self.group = build.group
        self.first, self.size = qkv.part_rows(self.part)
        # In float32, as Transformers multiplies before it rounds.
        wide = torch.empty(self.size, dtype=torch.float32, device=build.device)
        self.weight = nn.Parameter(wide, requires_grad=False)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        (qkv,) = self._qkv
        return {f"{prefix}.weight": LoadTarget((qkv.parts[self.part],), self._load)}

    def _load(self, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor[self.first : self.first + self.size])

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        x = heads.flatten(1)
        if self.group.size == 1:
            return ops.rms_norm(x, self.weight, self.eps).view_as(heads)
        wide = x.float()
        # Every rank has equally many heads, and a head that several ranks hold counts on each.
        total = self.group.all_reduce(wide.square().sum(-1, keepdim=True))
        scale = torch.rsqrt(total / (self.size * self.group.size) + self.eps)
        return (wide * scale * self.weight).to(x.dtype).view_as(heads)


class Olmo2Attention(LlamaAttention):
    """Grouped-query self-attention with norms of the whole q and k."""

    q_norm: HeadsNorm  # type: ignore[assignment]  # of all heads, not of each
    k_norm: HeadsNorm  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__(replace(config, qk_norm=False), layer, rotary)
        self.q_norm = HeadsNorm(self.qkv_proj, "q_proj", config.rms_norm_eps)
        self.k_norm = HeadsNorm(self.qkv_proj, "k_proj", config.rms_norm_eps)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        return super().attend(self.q_norm(q), self.k_norm(k), v, positions, cache, meta)


class Olmo2DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normalized after and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__()
        self.self_attn = Olmo2Attention(config, layer, rotary)
        self.post_attention_layernorm = rms_norm(config)
        self.mlp = LlamaMLP(config)
        self.post_feedforward_layernorm = rms_norm(config)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> tuple[torch.Tensor, None]:
        # Nothing normalizes the sum, so the stream itself goes from layer to layer.
        attended = self.self_attn(x, positions, cache, meta)
        x = self.narrow(x, meta) + self.post_attention_layernorm(self.narrow(attended, meta))
        return x + self.post_feedforward_layernorm(self.mlp(x)), None


class Olmo2ForCausalLM(LlamaForCausalLM):
    """OLMo 2 or 3."""

    decoder_layer = Olmo2DecoderLayer
