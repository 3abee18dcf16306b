"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786).

Llama's decoder with a norm before and after each sublayer, norms that multiply by 1 + w, embeddings
scaled by sqrt(hidden size) and a GELU gate. Gemma 2 alternates layers with a window and full ones and
caps scores and logits; Gemma 3 has five with a window to one full, q and k norms instead of caps, and
for its windows positions of their own. All but the norms' places is in the config.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.layers.attention import AttentionMetadata
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.config import ModelConfig
from octavo.models.interface import CausalLM
from octavo.models.llama import LlamaDecoderLayer, LlamaForCausalLM, rms_norm


class GemmaDecoderLayer(LlamaDecoderLayer):
    """Attention and feed-forward, each normalized before and after."""

    leaves_sums = False

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding):
        super().__init__(config, layer, rotary)
        self.pre_feedforward_layernorm = rms_norm(config)
        self.post_feedforward_layernorm = rms_norm(config)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn.after(self.input_layernorm, x, residual, positions, cache, meta)
        x, residual = self.post_attention_layernorm(self.narrow(x, meta)), self.narrow(residual, meta)
        x, residual = self.mlp.after(self.pre_feedforward_layernorm, x, residual)
        return self.post_feedforward_layernorm(x), residual


class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma 2 or 3."""

    decoder_layer = GemmaDecoderLayer


class Gemma3ForConditionalGeneration(CausalLM):
    """Gemma 3 out of a checkpoint that also has a vision tower, which is left out: text alone."""

    narrows = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.language_model = GemmaForCausalLM(config)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        return self.language_model(token_ids, positions, kv_caches, meta)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.language_model.local_logits(hidden)

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        return self.language_model.whole_logits(local)

    def likeliest(self, local: torch.Tensor) -> torch.Tensor:
        return self.language_model.likeliest(local)
