"""What products with matrices in the kernels' own layouts have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.kernels import ops
from octavo.kernels.cpu.ops import differ, dtype_code, row_stride

SILU, GELU_TANH = 0, 1  # `Gate` in gate.h
NO_GATE = -1
GATES: dict[Callable[[torch.Tensor], torch.Tensor], int] = {
    ops.silu_and_mul: SILU,
    ops.gelu_tanh_and_mul: GELU_TANH,
}
"""The gated activations that a product can end with."""


class KernelMatrix:
    """A matrix `[rows, columns]` that a C++ kernel multiplies; whoever makes it sets what stands here.

    Attributes:
        rows, columns: of the matrix.
        gates: whether `linear` takes a gate.
    """

    rows: int
    columns: int
    gates: bool
    _address: int  # of the matrix in C++
    _linear: Callable[..., int]  # the kernel

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, gate: int = NO_GATE) -> torch.Tensor:
        """`x @ W^T + bias`: `[any, columns]` to `[any, rows]` in `x`'s dtype.

        Args:
            x: float32 or bfloat16, rows any stride apart.
            bias: `[rows]` of `x`'s dtype.
            gate: SILU or GELU_TANH, if the matrix `gates`: the result is that of the first half of the
                rows times the second, `[any, rows / 2]`.
        """
        n, columns = x.shape
        if columns != self.columns:
            raise ValueError(f"x has {columns} columns, the matrix {self.columns}")
        if bias is not None and bias.dtype is not x.dtype:
            raise differ(x, bias)
        width = self.rows if gate == NO_GATE else self.rows // 2
        out = x.new_empty((n, width))
        status = self._linear(
            self._address,
            x.data_ptr(),
            n,
            row_stride(x),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            width,
            gate,
            dtype_code(x),
            torch.get_num_threads(),
        )
        if status:
            raise ValueError(f"this matrix of {self.rows} rows takes no gate")
        return out
