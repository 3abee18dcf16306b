"""The part of a decoder that one pipeline stage has.

A model's constructors make no parameters, so a stage builds the whole model and takes out what others have,
before its weights are made: a model file knows no stages, and a layer's name is the same on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.kv.format import KVGroup
from octavo.kv.groups import group_layers, stage_groups
from octavo.layers.attention_layer import CachedLayer
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.layer import BuildContext
from octavo.models.absent import Absent, remove_head
from octavo.models.interface import CausalLM
from octavo.models.llama import LlamaModel
from octavo.parallel.stages import Stage, divide_layers, read_partition

STEP_CONTEXT = 1024
"""Tokens that the requests of a full step are taken to have, on average."""


def step_tokens(max_num_seqs: int, stages: int, context: int) -> int:
    """Tokens whose keys and values a full step is taken to read in each stage, where requests have at most
    `context`."""
    return max_num_seqs // stages * min(context, STEP_CONTEXT)


def token_bytes(layer: CachedLayer) -> int:
    """Of one token's keys and values in an attention layer's cache."""
    return layer.fmt.layer_block_bytes() // layer.fmt.block_size


class StreamIn(Absent):
    """In place of the embedding on a later stage: the rows are the stream already."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class HeadsMatrix(VocabEmbedding):
    """The same on the last stage of a tied model, where the head uses the embedding's matrix."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class StreamOut(Absent):
    """In place of the final norm on an earlier stage: makes the stream that goes to the next one.

    Args:
        sums: `Norm.sums` of that norm.
    """

    def __init__(self, sums: bool):
        super().__init__()
        self._sums = sums

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self._group = build.group

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        if residual is None:
            return x, None
        # What the next stage's first norm would have added: it begins with the sum, and rounds it no further.
        return (self._group.all_reduce(x) if self._sums else x) + residual, None


class StageLayers(nn.Module):
    """A model's layers under their own names, of which one stage runs its own."""

    def __init__(self, layers: nn.ModuleList, own: range):
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer if number in own else Absent())
        self._own = own

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.get_submodule(str(number)) for number in self._own)

    def __len__(self) -> int:
        return len(self._own)


@dataclass(frozen=True)
class StagePart:
    """What one stage has of a model.

    Attributes:
        stage: its layers.
        groups: the KV groups of the whole model, the same on every stage.
    """

    stage: Stage
    groups: list[KVGroup]


def stage_part(
    whole: CausalLM,
    stage: int,
    stages: int,
    partition: str | None,
    max_num_seqs: int = 0,
    context: int = STEP_CONTEXT,
) -> StagePart:
    """What a stage of a model has, found from the shapes of all of it; the same on every stage.

    Args:
        whole: the model, on the meta device.
        stage: the stage's number, of `stages`.
        partition: the layers of each stage as the setting gives them; None: divided by `divide_layers`.
        max_num_seqs: requests of all steps under way: each is taken to read the keys and values of its share,
            `STEP_CONTEXT` tokens each, beside the weights.
        context: tokens of the longest request.

    Raises:
        ConfigError: a model that cannot be divided (so).
    """
    decoder = _decoder_of(whole)
    if partition is None:
        heads = [m for m in whole.modules() if isinstance(m, LMHead)]
        head = sum(_num_bytes(head if head.tied_to is None else head.tied_to) for head in heads)
        tokens = step_tokens(max_num_seqs, stages, context)
        costs = [
            _num_bytes(layer) + tokens * token_bytes(attention)
            for layer, attention in zip(decoder.layers, whole.attention_layers(), strict=True)
        ]
        bounds = divide_layers(costs, head, stages)
    else:
        bounds = read_partition(partition, len(decoder.layers), stages)
    layers = [(layer.sliding_window, layer.fmt) for layer in whole.attention_layers()]
    return StagePart(Stage(stage, bounds), group_layers(layers, bounds))


def keep_stage(model: CausalLM, part: StagePart) -> None:
    """Take out of a model all that other stages have, before its weights are made.

    Its `forward` then takes the stream `[rows, hidden_size]` in place of tokens on all but the first stage,
    and returns it on all but the last.

    Raises:
        ConfigError: a model that cannot be divided.
    """
    decoder, stage = _decoder_of(model), part.stage
    embedding = decoder.embed_tokens
    if not stage.is_first:
        decoder.embed_tokens = StreamIn()  # type: ignore[assignment]
    if not stage.is_last:
        decoder.norm = StreamOut(decoder.norm.sums)  # type: ignore[assignment]
        remove_head(model)
        model.narrows = False
    elif not stage.is_first:
        _tie_head(model, decoder, embedding)
    decoder.layers = StageLayers(decoder.layers, stage.layers)  # type: ignore[assignment]
    model.gives_states = False
    model.stage_groups = stage_groups(part.groups, stage.layers)


def _decoder_of(model: CausalLM) -> LlamaModel:
    decoder = next((module for module in model.modules() if isinstance(module, LlamaModel)), None)
    if decoder is None:
        how = "" if model.config.implementation == "octavo" else " through Transformers' code"
        raise ConfigError(
            f"pipeline_parallel_size: the layers of {model.config.architecture}{how} cannot be divided: "
            "leave it out, or use tensor_parallel_size"
        )
    return decoder


def _tie_head(model: CausalLM, decoder: LlamaModel, embedding: VocabEmbedding) -> None:
    """Give the last stage of a tied model the matrix that its head shares with the first one's embedding."""
    for module in model.modules():
        if isinstance(module, LMHead) and module.tied_to is embedding:
            decoder.embed_tokens = HeadsMatrix(embedding.vocab_size, embedding.hidden_size)
            module.tie_to(decoder.embed_tokens)


def _num_bytes(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
