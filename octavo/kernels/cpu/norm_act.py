"""The C++ norms, activations and softcap as functions of tensors; twins of `octavo.kernels.reference`.

What `octavo.kernels.cpu.ops` says of its functions holds here too. Norm weights are of the rows' dtype,
or float32.
"""

from __future__ import annotations

import torch

from octavo.kernels.cpu.ops import differ, dtype_code, library, row_stride
from octavo.kernels.cpu.products import GELU_TANH, SILU

# A decode step calls the norms some hundred times: a microsecond here is a tenth of a millisecond there.
# `empty_like` is the quickest way to a new tensor, and of a slice of rows makes contiguous ones.


def _check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.dtype is not x.dtype and weight.dtype is not torch.float32:
        raise differ(x, weight)


def _check_residual(x: torch.Tensor, residual: torch.Tensor) -> None:
    if residual.dtype is not x.dtype:
        raise differ(x, residual)
    if not residual.is_contiguous():
        raise ValueError(f"the residual must be contiguous, got strides {residual.stride()}")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension of `x` (`[rows, size]` or `[rows, heads, size]`): a new tensor."""
    _check_weight(x, weight)
    stride = row_stride(x)
    shape = x.shape
    out = torch.empty_like(x)
    library().octavo_rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        shape[0],
        1 if len(shape) == 2 else shape[1],
        shape[-1],
        stride,
        eps,
        dtype_code(x),
        dtype_code(weight),
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual += x` in place, then RMSNorm of it. `x`, `residual`: `[rows, size]`, `residual` contiguous.
    Returns the normed rows (new) and `residual`."""
    _check_weight(x, weight)
    _check_residual(x, residual)
    rows, size = residual.shape
    stride = row_stride(x)
    out = torch.empty_like(residual)
    library().octavo_add_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        stride,
        eps,
        dtype_code(x),
        dtype_code(weight),
        torch.get_num_threads(),
    )
    return out, residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension of `x` (`[rows, size]`): a new tensor."""
    return _layer_norm(x, None, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual += x` in place, then LayerNorm of it, as `add_rms_norm`."""
    _check_residual(x, residual)
    return _layer_norm(x, residual, weight, bias, eps), residual


def _layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    _check_weight(x, weight)
    if bias is not None and bias.dtype is not weight.dtype:
        raise differ(weight, bias)
    rows, size = x.shape
    stride = row_stride(x)
    out = torch.empty_like(x)
    library().octavo_layer_norm(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        stride,
        eps,
        dtype_code(x),
        dtype_code(weight),
        torch.get_num_threads(),
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[:, :n]) * x[:, n:]` of `[rows, 2 n]`: a new `[rows, n]`."""
    return _gated(x, SILU)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x[:, :n]) * x[:, n:]` of `[rows, 2 n]`, GELU by its tanh form: a new `[rows, n]`."""
    return _gated(x, GELU_TANH)


def _gated(x: torch.Tensor, gate: int) -> torch.Tensor:
    rows, size = x.shape
    stride = row_stride(x)
    out = x.new_empty((rows, size // 2))
    library().octavo_gated_activation(
        x.data_ptr(), out.data_ptr(), rows, size // 2, stride, gate, dtype_code(x), torch.get_num_threads()
    )
    return out


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(x / cap)` of `[rows, size]`, in place. Returns `x`."""
    rows, size = x.shape
    library().octavo_softcap(
        x.data_ptr(), rows, size, row_stride(x), cap, dtype_code(x), torch.get_num_threads()
    )
    return x
