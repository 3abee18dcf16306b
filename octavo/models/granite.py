"""Granite 3 (IBM, 2024): Llama's decoder with four scales.

Of the embeddings, of the attention's scores (instead of the head's size), of what each sublayer adds,
and of the logits; from the maximal update parametrization (arXiv 2203.03466).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.layers.attention import AttentionMetadata
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class GraniteDecoderLayer(LlamaDecoderLayer):
    """Attention and feed-forward, each scaled before it is added to the stream."""

    leaves_sums = False

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__(config, layer, rotary)
        self.scale = config.residual_scale

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn.after(self.input_layernorm, x, residual, positions, cache, meta)
        x, residual = self.narrow(x, meta) * self.scale, self.narrow(residual, meta)
        x, residual = self.mlp.after(self.post_attention_layernorm, x, residual)
        return x * self.scale, residual


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite, dense."""

    decoder_layer = GraniteDecoderLayer
