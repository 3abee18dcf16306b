"""Modules that are replaced before a model's weights are made, among them parts that are not here."""

from __future__ import annotations

from torch import nn

from octavo.layers.embedding import LMHead
from octavo.layers.layer import BuildContext, Layer, LoadTarget
from octavo.models.targets import left_out


class Absent(Layer):
    """In place of what another stage has, or nobody needs: holds nothing, and passes over what a checkpoint
    has for it."""

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        pass

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        return left_out(prefix)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of that with this full name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def remove_head(model: nn.Module) -> None:
    """Take out a model's output head: for embeddings, and for stages that are not the last."""
    for name in [name for name, module in model.named_modules() if isinstance(module, LMHead)]:
        replace_module(model, name, Absent())
