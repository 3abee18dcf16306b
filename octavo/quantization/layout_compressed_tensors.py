"""The tensors of compressed-tensors (https://github.com/neuralmagic/compressed-tensors), and of the "fp8"
format, which stores the same numbers under other names."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.kernels.reference_lowbit import FP8, FP8_BLOCK
from octavo.quantization.layout import (
    COLUMNS,
    ROWS,
    Layout,
    Pieces,
    checked_groups,
    codes_dummy,
    fp8_dummy,
    fp8_scale_dummy,
    group_axis,
    int4_matrix,
    int4_scale_dummy,
    int8_dummy,
    int8_scale_dummy,
    ones_dummy,
    order_dummy,
    order_of_groups,
)
from octavo.quantization.matrices import Matrix, Matrix8
from octavo.quantization.scheme import Rule, WeightScheme
from octavo.quantization.shard import Shard
from octavo.quantization.stored_tensor import FLOATS, INTEGERS, Axis, StoredTensor

_ANY = frozenset({torch.int8, torch.int32, FP8}) | FLOATS


class _Scaled(Layout):
    """What both formats share: scales by a strategy, and static scales of activations."""

    def __init__(self, scheme: WeightScheme, scale_name: str = "weight_scale"):
        self.scheme = scheme
        self.scale_name = scale_name

    def _scale(self, dummy: object) -> StoredTensor:
        """The tensor of scales."""
        scheme = self.scheme
        # Integers' may be below 0: AutoRound makes the largest weight of a group the least code.
        common = {"numbers": "positive" if scheme.kind == "fp8" else "factors", "dummy": dummy}
        if scheme.strategy == "tensor":
            return StoredTensor((1,), other_shapes=((), (1, 1)), **common)  # type: ignore[arg-type]
        if scheme.strategy == "channel":
            return StoredTensor((ROWS, 1), **common)  # type: ignore[arg-type]
        if scheme.strategy == "block":
            assert scheme.block is not None
            rows, columns = scheme.block
            axes = (Axis("rows", rows, True, True), Axis("columns", columns, True, True))
            return StoredTensor(axes, **common)  # type: ignore[arg-type]
        assert scheme.group_size is not None
        return StoredTensor((ROWS, group_axis(scheme.group_size)), **common)  # type: ignore[arg-type]

    def _activations(self) -> dict[str, StoredTensor]:
        static = self.scheme.activations is not None and not self.scheme.activations.dynamic
        return {
            "input_scale": StoredTensor(
                (1,),
                optional=not static,
                numbers="positive" if static else "any",
                dummy=ones_dummy if static else None,
                other_shapes=((), (1, 1)),
            )
        }

    def _matrix8(self, pieces: Pieces, shard: Shard) -> Matrix8:
        scale = pieces[self.scale_name].float()
        if self.scheme.strategy == "tensor":
            scale = scale.reshape(1).expand(shard.rows).contiguous()
        elif self.scheme.strategy == "channel":
            scale = scale.reshape(-1)
        activations = self.scheme.activations
        static = activations is not None and not activations.dynamic
        if self.scheme.strategy == "block" and not _is_grid(scale, shard):
            return Matrix8(pieces["weight"], _scales_of_rows(scale, shard))
        return Matrix8(
            pieces["weight"],
            scale.contiguous(),
            activations,
            pieces["input_scale"].float().reshape(1) if static else None,
        )


def _is_grid(scale: torch.Tensor, shard: Shard) -> bool:
    """Whether a shard begins with whole blocks of 128 x 128."""
    return scale.shape == (-(-shard.rows // FP8_BLOCK), -(-shard.cols // FP8_BLOCK))


def _scales_of_rows(scale: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Scales `[rows, groups]` of a shard that begins within a block, so that blocks were cut into smaller
    ones: a form for weights alone."""
    for dim, size in enumerate((shard.rows, shard.cols)):
        entries = scale.shape[dim]
        per = FP8_BLOCK if entries == -(-size // FP8_BLOCK) else size // entries
        if dim == 0 or (entries > 1 and per * entries != size):
            scale = scale.repeat_interleave(per, dim).narrow(dim, 0, size)
    return scale.contiguous()


class Fp8Layout(_Scaled):
    """ "fp8": `weight`, and `weight_scale_inv` (by which a code is multiplied all the same) of blocks, or
    `weight_scale` of the tensor."""

    def __init__(self, rule: Rule):
        assert rule.scheme is not None
        super().__init__(rule.scheme, "weight_scale_inv" if rule.layout == "block" else "weight_scale")

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        weight = StoredTensor((ROWS, COLUMNS), frozenset({FP8}), numbers="finite", dummy=fp8_dummy)
        return {"weight": weight, self.scale_name: self._scale(fp8_scale_dummy), **self._activations()}

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        return self._matrix8(pieces, shard)


class CompressedLayout(_Scaled):
    """float-quantized, int-quantized and naive-quantized: `weight` in a type of its own."""

    def __init__(self, rule: Rule):
        assert rule.scheme is not None
        super().__init__(rule.scheme)
        self.int8 = rule.scheme.kind == "int8"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        dtype, dummy = (torch.int8, int8_dummy) if self.int8 else (FP8, fp8_dummy)
        scale = self._scale(int8_scale_dummy if self.int8 else fp8_scale_dummy)
        asymmetric = not self.scheme.symmetric
        return {
            "weight": StoredTensor((ROWS, COLUMNS), frozenset({dtype}), numbers="finite", dummy=dummy),
            "weight_scale": scale,
            # Zeros, where the scheme is symmetric; older files store them.
            "weight_zero_point": StoredTensor(
                scale.axes,
                _ANY,
                not asymmetric,
                numbers="finite" if asymmetric else "any",
                dummy=_no_zeros,
                other_shapes=scale.other_shapes,
            ),
            "input_zero_point": StoredTensor((1,), _ANY, True, other_shapes=((), (1, 1))),
            **self._activations(),
        }

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        plain = self._matrix8(pieces, shard)
        if self.scheme.symmetric:
            return plain
        scale = plain.scale.reshape(shard.rows, -1)
        zeros = pieces["weight_zero_point"].float().reshape(-1, scale.shape[1]).expand_as(scale)
        return Matrix8(plain.weight, scale, zeros=zeros)


def _no_zeros(unit: torch.Tensor, std: float) -> torch.Tensor:
    return torch.zeros_like(unit, dtype=torch.int8)


class PackedLayout(_Scaled):
    """pack-quantized: codes of 4 or 8 bits, made unsigned, in words of 32 bits."""

    def __init__(self, rule: Rule):
        assert rule.scheme is not None
        super().__init__(rule.scheme)
        self.per_word = 32 // rule.scheme.bits

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        scheme = self.scheme
        scale = self._scale(int4_scale_dummy if scheme.bits == 4 else int8_scale_dummy)
        if scheme.act_order and scheme.group_size is not None:
            # A group is of columns that lie apart: all ranks take all of them.
            scale = replace(scale, axes=(ROWS, -(-columns // scheme.group_size)))
        words = frozenset({torch.int32})
        packed = StoredTensor((ROWS, Axis("columns", self.per_word)), words, dummy=codes_dummy)
        packed_zeros = StoredTensor((Axis("rows", self.per_word), *scale.axes[1:]), words, dummy=codes_dummy)
        plain_zeros = StoredTensor(scale.axes, _ANY, True)  # zeros, in older files of symmetric weights
        return {
            "weight_packed": packed,
            "weight_scale": scale,
            "weight_shape": StoredTensor((2,), INTEGERS, True),
            "weight_zero_point": plain_zeros if scheme.symmetric else packed_zeros,
            "weight_g_idx": StoredTensor(
                (COLUMNS,), INTEGERS, not scheme.act_order, dummy=order_dummy(scheme.group_size)
            ),
            **self._activations(),
        }

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        g_idx, whole = (pieces["weight_g_idx"] if self.scheme.act_order else None), shard.cols == columns
        scale = pieces["weight_scale"]
        if self.scheme.strategy == "tensor":
            scale = scale.reshape(1, 1).expand(shard.rows, 1)
        zeros = None if self.scheme.symmetric else pieces["weight_zero_point"]
        if self.scheme.bits == 4:
            return int4_matrix(
                name,
                pieces["weight_packed"].T,
                scale.T,
                None if zeros is None else zeros.T.contiguous(),
                g_idx,
                whole,
            )
        codes = bytes_of_words(pieces["weight_packed"])
        return int8_matrix(name, codes, scale, bytes_of(zeros), g_idx, whole)


def bytes_of_words(words: torch.Tensor) -> torch.Tensor:
    """uint8 `[N, 4 C]` of int32 `[N, C]`, the lowest byte first."""
    return words.contiguous().view(torch.uint8)


def bytes_of(zeros: torch.Tensor | None) -> torch.Tensor | None:
    """uint8 `[4 C, G]` of int32 `[C, G]`, the lowest byte first."""
    return None if zeros is None else bytes_of_words(zeros.T).T


def int8_matrix(
    name: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    whole: bool = True,
) -> Matrix8:
    """The int8 form, weights only, of unsigned codes.

    Args:
        name: of the matrix, for messages.
        codes: uint8 `[N, K]`.
        scale: `[N, groups]`.
        zeros: uint8 `[N, groups]`; None: 128.
        g_idx: the group of each column, or None.
        whole: whether all columns of each group are there.

    Returns:
        With zero points, or groups of columns that lie apart, a matrix that can only be dequantized.
    """
    weight = (codes.short() - 128).to(torch.int8)
    scale = scale.float()
    if zeros is not None and bool((zeros == 128).all()):
        zeros = None
    if g_idx is not None and not (whole and order_of_groups(name, g_idx, scale.shape[1]) is None):
        group = checked_groups(name, g_idx, scale.shape[1])  # a scale for each column
        scale = scale[:, group]
        zeros = None if zeros is None else zeros[:, group]
    flat = scale.shape[1] == 1 and zeros is None
    return Matrix8(
        weight,
        scale.reshape(-1).contiguous() if flat else scale.contiguous(),
        zeros=None if zeros is None else zeros.float() - 128,
    )
