"""A weight on its way from a file to a layer, still quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.kernels.reference_quant import QuantizedMatrix, dequantize

_ABOUT = {
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
}


class QuantizedTensor(torch.Tensor):
    """A quantized matrix that acts as the float32 one it stands for.

    Slices and gathers of its rows, and slices of its columns at multiples of 32, stay quantized; every other
    operation gets the numbers. So a layer that knows nothing of this loads it all the same.
    """

    matrix: QuantizedMatrix

    @staticmethod
    def of(matrix: QuantizedMatrix) -> QuantizedTensor:
        """The tensor of a matrix on the CPU."""
        out = torch.Tensor._make_wrapper_subclass(
            QuantizedTensor, matrix.q.shape, dtype=torch.float32, device=torch.device("cpu")
        )
        out.matrix = matrix
        return out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedTensor({list(self.matrix.q.shape)}, {self.matrix.format})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT:
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.__getitem__ and (piece := _piece(args[0].matrix, args[1])) is not None:
                return cls.of(piece)
            plain = {key: _plain(value) for key, value in (kwargs or {}).items()}
            return func(*[_plain(arg) for arg in args], **plain)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        plain = {key: _plain(value) for key, value in (kwargs or {}).items()}
        return func(*[_plain(arg) for arg in args], **plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_plain(item) for item in value])
    return dequantize(value.matrix) if isinstance(value, QuantizedTensor) else value


def _piece(matrix: QuantizedMatrix, index: Any) -> QuantizedMatrix | None:
    """The rows (and columns) of an index, or None where they cannot stay quantized."""
    rows, columns = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
    gathers = isinstance(rows, torch.Tensor) and rows.dim() == 1
    if not (isinstance(rows, slice) or gathers) or not isinstance(columns, slice):
        return None
    first, last, step = columns.indices(matrix.q.shape[1])
    if step != 1 or first % 32 or (last % 32 and last != matrix.q.shape[1]):
        return None
    groups = slice(first // matrix.format.group, last // matrix.format.group)
    minimum = None if matrix.minimum is None else matrix.minimum[rows, groups]
    return QuantizedMatrix(matrix.format, matrix.q[rows, first:last], matrix.scale[rows, groups], minimum)


def joined(parts: list[QuantizedMatrix]) -> list[QuantizedMatrix]:
    """The same rows with neighbouring parts of one format made one."""
    out: list[QuantizedMatrix] = []
    run: list[QuantizedMatrix] = []
    for part in [*parts, None]:
        if run and (part is None or part.format != run[0].format):
            out.append(run[0] if len(run) == 1 else _stack(run))
            run = []
        if part is not None:
            run.append(part)
    return out


def _stack(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    minima = [part.minimum for part in parts if part.minimum is not None]
    return QuantizedMatrix(
        parts[0].format,
        torch.cat([part.q for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(minima) if minima else None,
    )
