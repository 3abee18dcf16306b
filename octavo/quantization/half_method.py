"""Weights of 16-bit floats, kept so in memory and computed on in float32, on CPUs.

Widening is exact, so products are those of float32 weights; a step reads half as much memory. Activations are
float32 or bfloat16, which is widened too (float16 by PyTorch, before and after).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from octavo.kernels.cpu import half
from octavo.kernels.cpu.products import GATES
from octavo.quantization.embedding_method import EmbeddingMethod, UnquantizedEmbeddingMethod
from octavo.quantization.linear_method import GatedActivation, ProductMemory, Shard, StoredRows

_STEP = 1 << 20  # numbers that are copied at a time: 2 MiB


class HalfMethod(UnquantizedEmbeddingMethod):
    """A matrix in 16 bits as `layer.half_matrix`, its memory the buffer `panels`.

    It has the activations' dtype where that has 16 bits. Beside float32 activations it has the type in which
    its pieces come; where they come in several, or in others, the layer has a `weight` in float32.
    """

    name = "half"
    keeps: ClassVar[frozenset[str]] = frozenset({"BF16", "F16"})

    def kept_bytes(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        if not _all_half(parts, dtype):
            return super().kept_bytes(parts, columns, dtype, device)
        return half.matrix_bytes(sum(rows for rows, _ in parts), columns)

    def tied_bytes(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        return 0 if _all_half(parts, dtype) else super().tied_bytes(parts, columns, dtype, device)

    def product_memory(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> ProductMemory:
        if not _all_half(parts, dtype):
            return super().product_memory(parts, columns, dtype, device)
        rows = sum(rows for rows, _ in parts)
        gates = dtype is not torch.float16 and rows % (2 * half.panel()) == 0
        return ProductMemory(gate_copies=1) if gates else ProductMemory()

    def create_weights(
        self, layer: nn.Module, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if device.type == "meta":  # sizes alone are asked for
            super().create_weights(layer, out_features, in_features, torch.bfloat16, device)
        layer.half_matrix = None  # type: ignore[assignment]
        layer.matrix_shape = (out_features, in_features)  # type: ignore[assignment]
        layer.activation_dtype = dtype  # type: ignore[assignment]

    def load_shard(self, layer: nn.Module, name: str, tensor: torch.Tensor, shard: Shard) -> None:
        matrix = _half(layer)
        dtype: torch.dtype = layer.activation_dtype  # type: ignore[assignment]
        if dtype not in half.DTYPES:
            dtype = tensor.dtype
        if matrix is None and "weight" not in layer._parameters and dtype in half.DTYPES:
            matrix = half.HalfMatrix(*_shape(layer), dtype)
            layer.half_matrix = matrix  # type: ignore[assignment]
        if matrix is None or dtype is not matrix.dtype:
            self._widen(layer)
            super().load_shard(layer, name, tensor, shard)
            return
        piece = tensor[shard.row : shard.row + shard.rows, shard.col : shard.col + shard.cols]
        step = max(1, _STEP // matrix.columns)
        scratch = torch.empty(min(step, shard.rows), matrix.columns, dtype=matrix.dtype)
        for first in range(0, shard.rows, step):
            rows = scratch[: min(step, shard.rows - first)]
            # A copy by PyTorch: a file's tensor may be read by it alone (`models.file_tensor`).
            matrix.fill(shard.target + first, rows.copy_(piece[first : first + step]))

    def _widen(self, layer: nn.Module) -> None:
        """Give the layer a `weight`, with what has come so far and zeros elsewhere."""
        if "weight" in layer._parameters:
            return
        rows, columns = _shape(layer)
        dtype: torch.dtype = layer.activation_dtype  # type: ignore[assignment]
        super().create_weights(layer, rows, columns, dtype, torch.device("cpu"))
        weight = layer.get_parameter("weight")
        matrix = _half(layer)
        if matrix is None:
            weight.zero_()
            return
        matrix.finish()
        for ids in torch.arange(rows).split(max(1, _STEP // columns)):
            weight[ids[0] : ids[-1] + 1].copy_(matrix.look_up(ids))
        layer.half_matrix = None  # type: ignore[assignment]

    def process_after_load(self, layer: nn.Module) -> None:
        if _half(layer) is None:
            super().process_after_load(layer)
        else:
            self.finish_embedding(layer)

    def finish_embedding(self, layer: nn.Module) -> None:
        matrix = _half(layer)
        if matrix is not None:
            matrix.finish()
            layer.register_buffer("panels", matrix.data.view(matrix.dtype), persistent=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        matrix = _half(layer)
        if matrix is None:
            return super().apply(layer, x, bias)
        if x.dtype is not torch.float16:
            return matrix.linear(x, bias)
        return matrix.linear(x.float(), None if bias is None else bias.float()).to(x.dtype)

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation
    ) -> torch.Tensor:
        matrix, gate = _half(layer), GATES.get(act)
        if matrix is None or gate is None or not matrix.gates or x.dtype is torch.float16:
            return super().apply_gated(layer, x, bias, act)
        return matrix.linear(x, bias, gate)

    def look_up(self, layer: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        matrix = _half(layer)
        if matrix is None:
            return super().look_up(layer, token_ids)
        dtype: torch.dtype = layer.activation_dtype  # type: ignore[assignment]
        return matrix.look_up(token_ids.reshape(-1)).to(dtype).view(*token_ids.shape, -1)

    def look_up_part(self, layer: nn.Module, token_ids: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        if _half(layer) is None:
            return super().look_up_part(layer, token_ids, first, rows)
        return EmbeddingMethod.look_up_part(self, layer, token_ids, first, rows)

    def share(self, layer: nn.Module, source: nn.Module) -> None:
        matrix = _half(source)
        layer.half_matrix = matrix  # type: ignore[assignment]
        if matrix is None:
            super().share(layer, source)

    def same(self, layer: nn.Module, source: nn.Module) -> bool:
        ours, theirs = _half(layer), _half(source)
        if ours is None and theirs is None:
            return super().same(layer, source)
        if ours is None or theirs is None:
            return False
        ours.finish()
        theirs.finish()
        return ours.equals(theirs)


def _all_half(parts: Sequence[StoredRows], dtype: torch.dtype) -> bool:
    """Whether all rows are kept in one 16-bit type; stored types by PyTorch's or GGML's names."""
    if dtype in half.DTYPES:
        return True
    kinds = {stored for _, stored in parts}
    return kinds in ({"bfloat16"}, {"float16"}, {"BF16"}, {"F16"})


def _half(layer: nn.Module) -> half.HalfMatrix | None:
    matrix: half.HalfMatrix | None = layer.half_matrix  # type: ignore[assignment]
    return matrix


def _shape(layer: nn.Module) -> tuple[int, int]:
    shape: tuple[int, int] = layer.matrix_shape  # type: ignore[assignment]
    return shape
