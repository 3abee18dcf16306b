"""The tensors of AutoGPTQ and GPTQModel (versions 1 and 2), and of AutoAWQ ("gemm")."""

from __future__ import annotations

import torch

from octavo.errors import ModelError
from octavo.kernels.reference_lowbit import pack_columns, pack_rows, unpack_columns
from octavo.quantization.layout import (
    COLUMNS,
    ROWS,
    Layout,
    Pieces,
    codes_dummy,
    group_axis,
    int4_matrix,
    int4_scale_dummy,
    order_dummy,
)
from octavo.quantization.layout_compressed_tensors import bytes_of_words, int8_matrix
from octavo.quantization.matrices import Matrix
from octavo.quantization.scheme import Rule, WeightScheme
from octavo.quantization.shard import Shard
from octavo.quantization.stored_tensor import INTEGERS, Axis, StoredTensor

_WORDS = frozenset({torch.int32})
_NATURAL = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ keeps column i of a word's eight


def _groups(scheme: WeightScheme) -> Axis | int:
    """The dimension of groups: one, without a size."""
    return 1 if scheme.group_size is None else group_axis(scheme.group_size)


class GPTQLayout(Layout):
    """`qweight [K / 8, N]`, `qzeros [groups, N / 8]` (version 1: less 1), `scales [groups, N]`, `g_idx`."""

    def __init__(self, rule: Rule):
        assert rule.scheme is not None
        self.scheme = rule.scheme
        self.minus_one = rule.layout == "gptq"
        self.per_word = 32 // rule.scheme.bits

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        groups = _groups(self.scheme)
        if self.scheme.group_size is not None and self.scheme.act_order:
            # A group is of columns that lie apart: all ranks take all of them.
            groups = -(-columns // self.scheme.group_size)
        return {
            "qweight": StoredTensor((Axis("columns", self.per_word), ROWS), _WORDS, dummy=codes_dummy),
            "qzeros": StoredTensor((groups, Axis("rows", self.per_word)), _WORDS, dummy=self._zeros_dummy),
            "scales": StoredTensor((groups, ROWS), numbers="factors", dummy=self._scale_dummy),
            "g_idx": StoredTensor(
                (COLUMNS,), INTEGERS, not self.scheme.act_order, dummy=order_dummy(self.scheme.group_size)
            ),
            # Layers without one may be given zeros.
            "bias": StoredTensor((ROWS,), optional=True),
        }

    def _zeros_dummy(self, unit: torch.Tensor, std: float) -> torch.Tensor:
        plain, less = (0x88888888, 0x77777777) if self.scheme.bits == 4 else (0x80808080, 0x7F7F7F7F)
        return torch.full_like(unit, less if self.minus_one else plain - (1 << 32), dtype=torch.int32)

    def _scale_dummy(self, unit: torch.Tensor, std: float) -> torch.Tensor:
        return int4_scale_dummy(unit, std if self.scheme.bits == 4 else std / 16)

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        bias = pieces.get("bias")
        if bias is not None and bool((bias != 0).any()):
            raise ModelError(
                f"{name}: the checkpoint has a bias where the model has none: check that weights and config "
                "belong together"
            )
        g_idx, whole = (pieces["g_idx"] if self.scheme.act_order else None), shard.cols == columns
        if self.scheme.bits == 4:
            zeros = pieces["qzeros"]
            if self.minus_one:
                zeros = pack_columns((unpack_columns(zeros) + 1) & 15)
            return int4_matrix(name, pieces["qweight"], pieces["scales"], zeros, g_idx, whole)
        zeros8 = bytes_of_words(pieces["qzeros"]).T  # [N, groups]
        if self.minus_one:
            zeros8 = zeros8 + 1  # which wraps
        codes = bytes_of_words(pieces["qweight"].T)
        return int8_matrix(name, codes, pieces["scales"].T, zeros8, g_idx, whole)


class AWQLayout(Layout):
    """`qweight [K, N / 8]`, `qzeros [groups, N / 8]`, columns of a word shuffled, `scales [groups, N]`."""

    def __init__(self, rule: Rule):
        assert rule.scheme is not None
        self.scheme = rule.scheme

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        groups = _groups(self.scheme)
        return {
            "qweight": StoredTensor((COLUMNS, Axis("rows", 8)), _WORDS, dummy=codes_dummy),
            "qzeros": StoredTensor((groups, Axis("rows", 8)), _WORDS, dummy=codes_dummy),
            "scales": StoredTensor((groups, ROWS), numbers="factors", dummy=int4_scale_dummy),
        }

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        codes, zeros = (self._natural(pieces[key]) for key in ("qweight", "qzeros"))
        return int4_matrix(name, pack_rows(codes), pieces["scales"], pack_columns(zeros), None)

    def _natural(self, words: torch.Tensor) -> torch.Tensor:
        """uint8 codes `[R, N]` of int32 `[R, N / 8]`, in the order of the matrix's rows."""
        return unpack_columns(words).unflatten(1, (-1, 8))[:, :, list(_NATURAL)].flatten(1)
