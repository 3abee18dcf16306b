"""Mixtral (arXiv 2401.04088): the Llama decoder with experts in place of every feed-forward."""

from __future__ import annotations

from octavo.layers.moe import MoE
from octavo.layers.sublayer import Sublayer
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class MixtralDecoderLayer(LlamaDecoderLayer):
    """Llama's, with experts."""

    def feed_forward(self, config: ModelConfig, layer: int) -> Sublayer:
        assert config.moe is not None
        return MoE(
            config.hidden_size,
            config.moe,
            config.hidden_act,
            names=("w1", "w3", "w2"),
            block="block_sparse_moe",
        )


class MixtralForCausalLM(LlamaForCausalLM):
    """The decoder with its output head."""

    decoder_layer = MixtralDecoderLayer
