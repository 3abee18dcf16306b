"""What the worker may ask of any model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from octavo.kernels import ops
from octavo.kv.format import KVGroup
from octavo.kv.groups import group_layers
from octavo.layers.attention import AttentionMetadata, PagedBackend
from octavo.layers.attention_layer import CachedLayer
from octavo.layers.embedding import VocabEmbedding
from octavo.layers.layer import LoadTarget
from octavo.layers.moe import Experts
from octavo.models.aliases import AliasTargets, with_prefix
from octavo.models.config import ModelConfig
from octavo.models.targets import Targets


class CausalLM(nn.Module, ABC):
    """A decoder that maps rows of a ragged batch to hidden states, and those to logits.

    Its constructor takes a `ModelConfig` alone; `octavo.models.loading` makes its parameters.

    Attributes:
        narrows: whether it minds `AttentionMetadata.wanted_rows`, and so returns only the rows wanted.
        gives_states: whether it can give hidden states beside its result (`give_states`).
        aux_layers: the layers whose inputs it gives.
        aux_states: those of the step that was launched last, `[rows, hidden_size]` each, in their order; a
            step overwrites them.
        stage_groups: the KV groups of a pipeline stage (`octavo.models.stage`); None: it is a whole model.
    """

    config: ModelConfig
    narrows: bool = False
    gives_states: bool = False
    aux_layers: tuple[int, ...] = ()
    aux_states: Sequence[torch.Tensor] = ()
    stage_groups: list[KVGroup] | None = None
    # By KV group; None: no layer of it is here.
    _planners: Sequence[PagedBackend | None] = ()

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """Hidden states after the final norm, `[rows, hidden_size]` in the model's dtype: of all rows, or of
        those wanted.

        Call `plan_attention(meta)` first, once per step.

        Args:
            token_ids: integer `[rows]`.
            positions: int64 `[rows]`, of each token in its request.
            kv_caches: one tensor per attention layer, of its `KVFormat`'s shape.
            meta: the step's batch, one entry per KV group.
        """

    @abstractmethod
    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logits of hidden states, which are `[rows, hidden_size]`."""

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        """Logits of all ranks, `[rows, vocab_size]`, of every one's part; the parts' dtype."""
        return local

    def likeliest(self, local: torch.Tensor) -> torch.Tensor:
        """The token with the largest logit of each row, integers `[rows]`, of every rank's part."""
        return ops.argmax(local)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, vocab_size]` of hidden states, in the model's dtype (the sampler widens)."""
        return self.whole_logits(self.local_logits(hidden))

    def give_states(self, layers: Sequence[int]) -> None:
        """Keep the residual stream of every row as it enters some layers; the number of all layers means: as
        it leaves the last."""
        assert self.gives_states
        self.aux_layers = tuple(layers)
        if self.config.num_layers in self.aux_layers:
            self.narrows = False

    def embedding(self) -> VocabEmbedding:
        """The table of the tokens' vectors.

        Raises:
            NotImplementedError: the model is none that gives states (`gives_states`).
        """
        raise NotImplementedError(f"{type(self).__name__} gives no hidden states")

    def checkpoint_targets(self, targets: dict[str, LoadTarget]) -> Targets:
        """What the layers take of a checkpoint, with the other names under which one may hold it: a bare
        decoder's leave out the `model.` before each."""
        return AliasTargets(targets, lambda name, known: with_prefix("model", name, known))

    def why_no_graphs(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why steps of this model cannot be recorded as device graphs; None: they can."""
        for planner in self._planners:
            if planner is not None and not planner.recordable:
                return f"{planner.name} attention cannot be captured in a graph"
        for module in self.modules():
            if isinstance(module, Experts) and not module.method.recordable(module):
                return f"experts in {module.method.name} are chosen on the host"
        return None

    def attention_layers(self) -> list[CachedLayer]:
        """The layers with a KV cache, in the order of their caches."""
        return [module for module in self.modules() if isinstance(module, CachedLayer)]

    def kv_groups(self) -> list[KVGroup]:
        """This rank's KV groups: what one block id stands for in each."""
        if self.stage_groups is not None:
            return self.stage_groups
        return group_layers([(layer.sliding_window, layer.fmt) for layer in self.attention_layers()])

    def assign_kv_groups(self) -> None:
        """Tell the built layers which entry of the step's metadata is theirs."""
        layers = self.attention_layers()
        planners: list[PagedBackend | None] = []
        for number, group in enumerate(self.kv_groups()):
            for layer in group.layers:
                layers[layer].kv_group = number
            # One layer's backend plans for the group: a plan depends on batch and shapes, which they share.
            planners.append(layers[group.layers[0]].backend if group.layers else None)
        self._planners = planners

    def plan_attention(self, meta: Sequence[AttentionMetadata]) -> None:
        """Let the attention backends prepare the step's schedule (fills each entry's `plan`)."""
        for planner, batch in self._planned(meta):
            planner.plan(batch)

    def cascades(self) -> list[bool]:
        """Per KV group, whether attention reads once what all requests share (`shared_blocks`)."""
        return [planner is not None and planner.cascades for planner in self._planners]

    def prepare_capture(self, meta: Sequence[AttentionMetadata]) -> None:
        """Make `meta` safe to record in a device graph."""
        for planner, batch in self._planned(meta):
            planner.prepare_capture(batch)

    def prepare_replay(self, meta: Sequence[AttentionMetadata]) -> None:
        """Refresh what a recorded graph reads, before its replay on `meta`."""
        for planner, batch in self._planned(meta):
            planner.prepare_replay(batch)

    def _planned(self, meta: Sequence[AttentionMetadata]) -> Iterator[tuple[PagedBackend, AttentionMetadata]]:
        """The groups that have layers here."""
        for planner, batch in zip(self._planners, meta, strict=True):
            if planner is not None:
                yield planner, batch
