"""Matrices of an unquantized checkpoint, quantized tensor by tensor as they are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.errors import ModelError
from octavo.quantization.layout import COLUMNS, ROWS, Layout, Pieces
from octavo.quantization.layout_compressed_tensors import CompressedLayout, PackedLayout
from octavo.quantization.matrices import Matrix
from octavo.quantization.rounding import QUICK, fitted, round_matrix
from octavo.quantization.scheme import Rule
from octavo.quantization.shard import Shard
from octavo.quantization.stored_tensor import StoredTensor


class OnlineLayout(Layout):
    """`weight` of a checkpoint; what is kept of it are compressed-tensors' tensors of the rule's scheme.

    Each rank quantizes its own piece: scales of tensors, and of channels split by columns, are those of it.
    """

    def __init__(self, rule: Rule):
        assert rule.scheme is not None
        self.rule, self.scheme = rule, rule.scheme
        self.packed = rule.layout == "pack-quantized"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor((ROWS, COLUMNS), dummy=lambda unit, std: unit * std)}

    def kept(self, name: str, key: str, view: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        try:
            scheme = fitted(self.scheme, view.shape[1])
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        return round_matrix(name, view, scheme, packed=self.packed, device=device, ends=QUICK)

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        rule = replace(self.rule, scheme=fitted(self.scheme, shard.cols))
        layout = PackedLayout(rule) if self.packed else CompressedLayout(rule)
        return layout.matrix(name, pieces, shard, columns)
