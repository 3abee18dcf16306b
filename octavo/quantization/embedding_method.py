"""How the table of an embedding is stored and looked up, and shared with a head that is tied to it."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

from octavo.quantization.linear_method import LinearMethod, UnquantizedLinearMethod


class EmbeddingMethod(LinearMethod):
    """A `LinearMethod` whose matrix also serves as an embedding's table.

    The same method stores the embedding and a head that is tied to it.
    """

    @abstractmethod
    def look_up(self, layer: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix in the activations' dtype: integers `[…]` to `[…, in]`."""

    def finish_embedding(self, layer: nn.Module) -> None:  # noqa: B027 (optional hook)
        """What `process_after_load` is to a linear layer: repack a table that will be looked up."""

    @abstractmethod
    def share(self, layer: nn.Module, source: nn.Module) -> None:
        """Make the matrix of `source`, an embedding all of whose shards are there, that of `layer` too; comes
        before `process_after_load` of `layer`."""

    @abstractmethod
    def same(self, layer: nn.Module, source: nn.Module) -> bool:
        """Whether the matrices of two layers, all of whose shards are there, are equal."""


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod, EmbeddingMethod):
    """The table as it is, `weight [out, in]`."""

    def look_up(self, layer: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, layer.weight)  # type: ignore[arg-type]

    def share(self, layer: nn.Module, source: nn.Module) -> None:
        layer.weight = source.weight

    def same(self, layer: nn.Module, source: nn.Module) -> bool:
        return torch.equal(layer.get_parameter("weight"), source.get_parameter("weight"))


def embedding_method(linear: LinearMethod) -> EmbeddingMethod:
    """The method of an embedding where `linear` is that of a linear layer: the same where it can."""
    return linear if isinstance(linear, EmbeddingMethod) else UnquantizedEmbeddingMethod()
