"""Qwen3-MoE (arXiv 2505.09388) and Qwen2-MoE (arXiv 2407.10671): Qwen's decoders with experts.

Qwen2-MoE has an expert that every token visits, weighted by the sigmoid of a learned score.
"""

from __future__ import annotations

from octavo.layers.moe import MoE
from octavo.layers.sublayer import Sublayer
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Qwen3MoeDecoderLayer(LlamaDecoderLayer):
    """Llama's, with experts in the layers that the config names."""

    def feed_forward(self, config: ModelConfig, layer: int) -> Sublayer:
        if config.moe is None or layer not in config.moe.layers:
            return super().feed_forward(config, layer)
        return MoE(
            config.hidden_size, config.moe, config.hidden_act, shared_name="shared_expert", shared_gate=True
        )


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """The decoder with its output head."""

    decoder_layer = Qwen3MoeDecoderLayer
