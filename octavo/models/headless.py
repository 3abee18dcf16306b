"""Decoders without their output head, for embeddings."""

from __future__ import annotations

import torch
from torch import nn

from octavo.layers.embedding import LMHead
from octavo.layers.layer import BuildContext, Layer, LoadTarget


class UnusedHead(Layer):
    """In place of an output head: holds nothing, and passes over the matrix that a checkpoint may store."""

    def __init__(self, head: LMHead):
        super().__init__()
        self._shape = (head.vocab_size, head.hidden_size)

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        pass

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        shapes = {"weight": self._shape, "bias": self._shape[:1]}
        return {
            f"{prefix}.{name}": LoadTarget(shape, _pass_over, True, regions=())
            for name, shape in shapes.items()
        }


def _pass_over(tensor: torch.Tensor) -> None:
    pass


def remove_head(model: nn.Module) -> None:
    """Replace a model's output head, before its weights are made."""
    heads = [(name, module) for name, module in model.named_modules() if isinstance(module, LMHead)]
    for name, head in heads:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, UnusedHead(head))
