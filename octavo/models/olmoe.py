"""OLMoE (arXiv 2409.02060): Llama's decoder with experts, and OLMo 2's norms of the whole q and k."""

from __future__ import annotations

from octavo.layers.moe import MoE
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.sublayer import Sublayer
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from octavo.models.olmo2 import Olmo2Attention


class OlmoeDecoderLayer(LlamaDecoderLayer):
    """Llama's, with experts."""

    def attention(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding) -> Sublayer:
        return Olmo2Attention(config, layer, rotary)

    def feed_forward(self, config: ModelConfig, layer: int) -> Sublayer:
        assert config.moe is not None
        return MoE(config.hidden_size, config.moe, config.hidden_act)


class OlmoeForCausalLM(LlamaForCausalLM):
    """The decoder with its output head."""

    decoder_layer = OlmoeDecoderLayer
