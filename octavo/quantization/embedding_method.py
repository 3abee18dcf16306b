"""How the table of an embedding is stored and looked up, and shared with a head that is tied to it."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

from octavo.kernels import ops
from octavo.quantization.linear_method import LinearMethod, UnquantizedLinearMethod


class EmbeddingMethod(LinearMethod):
    """A `LinearMethod` whose matrix also serves as an embedding's table.

    The same method stores the embedding and a head that is tied to it.
    """

    @abstractmethod
    def look_up(self, layer: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix in the activations' dtype: integers `[…]` to `[…, in]`."""

    def look_up_part(self, layer: nn.Module, token_ids: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        """The same where the matrix has the tokens from `first` on, `rows` of them; zeros of others."""
        local = token_ids - first
        here = (local >= 0) & (local < rows)
        return self.look_up(layer, local.where(here, 0)) * here.unsqueeze(-1)

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

    def look_up_part(self, layer: nn.Module, token_ids: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        return ops.look_up_part(layer.weight, token_ids, first)  # type: ignore[arg-type]

    def share(self, layer: nn.Module, source: nn.Module) -> None:
        layer.weight = source.weight

    def same(self, layer: nn.Module, source: nn.Module) -> bool:
        return torch.equal(layer.get_parameter("weight"), source.get_parameter("weight"))


def embedding_method(linear: LinearMethod) -> EmbeddingMethod:
    """The method of an embedding where `linear` is that of a linear layer: the same where it can."""
    return linear if isinstance(linear, EmbeddingMethod) else UnquantizedEmbeddingMethod()
