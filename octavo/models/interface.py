"""What the worker may ask of any model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from octavo.kv.format import KVGroup
from octavo.layers.attention import AttentionBackend, AttentionMetadata
from octavo.layers.attention_layer import Attention
from octavo.models.config import ModelConfig
from octavo.models.kv_groups import group_layers


class CausalLM(nn.Module, ABC):
    """A decoder that maps rows of a ragged batch to hidden states, and those to logits.

    Its constructor takes a `ModelConfig` alone; `octavo.models.loading` makes its parameters.
    """

    config: ModelConfig
    _planner: AttentionBackend | None = None

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states after the final norm, `[rows, hidden_size]` in the model's dtype.

        Call `plan_attention(meta)` first, once per step.

        Args:
            token_ids: integer `[rows]`.
            positions: int64 `[rows]`, of each token in its request.
            kv_caches: one tensor per layer, `[num_blocks, 2, kv_heads, block_size, head_dim]`.
            meta: the step's batch.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, vocab_size]` of hidden states, in the model's dtype (the sampler widens)."""

    def attention_layers(self) -> list[Attention]:
        """The attention layers, in the order of their caches."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def plan_attention(self, meta: AttentionMetadata) -> None:
        """Let the attention backend prepare the step's schedule (fills `meta.plan`)."""
        self._backend().plan(meta)

    def prepare_capture(self, meta: AttentionMetadata) -> None:
        """Make `meta` safe to record in a device graph."""
        self._backend().prepare_capture(meta)

    def prepare_replay(self, meta: AttentionMetadata) -> None:
        """Refresh what a recorded graph reads, before its replay on `meta`."""
        self._backend().prepare_replay(meta)

    def _backend(self) -> AttentionBackend:
        """One layer's backend: a plan depends on the batch and the shapes, which all layers share."""
        if self._planner is None:
            self._planner = self.attention_layers()[0].backend
        return self._planner

    def kv_groups(self) -> list[KVGroup]:
        """This rank's KV groups: what one block id stands for in each, as the built layers expect."""
        layers = self.attention_layers()
        return group_layers([layer.sliding_window for layer in layers], layers[0].fmt)
