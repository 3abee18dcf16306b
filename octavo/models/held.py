"""Models whose weights the program has in memory already, kept by the folders in which their configs lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HeldModel:
    """A model in memory.

    Attributes:
        name: for messages.
        tensors: its weights, under the names that a checkpoint would have.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]


_held: dict[Path, HeldModel] = {}


def hold(folder: Path, model: HeldModel) -> None:
    """Keep a model's weights for whoever loads the model of a folder that has its config alone."""
    _held[folder] = model


def release(folder: Path) -> None:
    """Keep them no longer."""
    _held.pop(folder, None)


def held_model(folder: Path) -> HeldModel | None:
    """The model whose weights are kept for a folder, if any are."""
    return _held.get(folder)
