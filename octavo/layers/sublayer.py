"""The parts of a decoder layer, attention and feed-forward, and what all such layers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from octavo.layers.attention import AttentionMetadata
from octavo.quantization.linear_method import AddingNorm

Rows = TypeVar("Rows", bound=torch.Tensor | None)


class Sublayer(nn.Module):
    """A part of a decoder layer, whose result is added to the residual stream."""

    def after(
        self, norm: AddingNorm, x: torch.Tensor, residual: torch.Tensor | None, *inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`self(norm.add(x, residual), *inputs)`, and the stream that `add` returns.

        Override it where the norm can be part of the sublayer's first product.
        """
        x, residual = norm.add(x, residual)
        return self(x, *inputs), residual

    def leave_sums(self) -> None:
        """Yield this rank's part of the result from now on: a norm that `sums` adds it up.

        Raises:
            NotImplementedError: it always yields the whole.
        """
        raise NotImplementedError(f"{type(self).__name__} adds up over ranks itself")


class DecoderLayer(nn.Module):
    """One layer of a decoder.

    Attributes:
        is_last: set on a model's last layer, after which only the rows that somebody reads matter.
        leaves_sums: whether the layer's result is this rank's part of it, which the next norm `sums`.
    """

    is_last = False
    leaves_sums = False

    def narrow(self, rows: Rows, meta: Sequence[AttentionMetadata]) -> Rows:
        """In the last layer, those of a step's `rows` that are read (`wanted_rows`), else all.

        Call it once keys and values are stored and attention is done: nothing later looks across rows.
        """
        wanted = meta[0].wanted_rows if self.is_last else None
        if wanted is None or rows is None:
            return rows
        return rows.index_select(0, wanted)  # type: ignore[return-value]
