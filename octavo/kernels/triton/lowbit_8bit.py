"""Products in 8 bits on a GPU: for each number of rows the kernel that is fastest, and activations quantized
where they are made. Signatures and meaning are those of `octavo.kernels.lowbit_ops`."""

from __future__ import annotations

import torch

from octavo.kernels import ops
from octavo.kernels.reference_lowbit import Activation
from octavo.kernels.triton.choice_8bit import Kind8, choose
from octavo.kernels.triton.launch import power_of_2
from octavo.kernels.triton.linear_choice import Choice
from octavo.kernels.triton.row_8bit import fitted, row_8bit
from octavo.kernels.triton.row_8bit_warps import WarpsConfig, row_8bit_warps
from octavo.kernels.triton.rows_8bit import (
    FP8_GROUPS,
    Form,
    Rows8,
    gated_quantize,
    quantize_rows,
    rms_norm_quantize,
)
from octavo.kernels.triton.scale_rows import scale_rows
from octavo.kernels.triton.skinny_8bit import skinny_8bit
from octavo.kernels.triton.skinny_linear import SkinnyConfig


def kind_of(weight: torch.Tensor, scale: torch.Tensor) -> Kind8:
    """By what table and kernels a matrix is multiplied."""
    if weight.dtype is torch.int8:
        return "int8"
    return "fp8_block" if scale.dim() == 2 else "fp8"


def form_of(weight: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor | None = None) -> Form:
    """How rows for a matrix are quantized."""
    return FP8_GROUPS if scale.dim() == 2 else Form(weight.dtype, False, input_scale)


def multiply(
    rows: Rows8,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    choice: Choice | None = None,
) -> torch.Tensor:
    """Rows of 8 bits times a matrix of the same kind: `[M, K]` to `[M, N]` of `dtype`.

    Args:
        choice: "skinny" or "cublas"; None: what `choice_8bit` knows.
    """
    count, size_in = rows.codes.shape
    kind = kind_of(weight, scale)
    if choice is None:
        # One row has been quantized already. Choices for many rows differ little, and are remembered.
        about = max(2, count) if count <= 256 else power_of_2(count)
        choice = choose(about, size_in, weight.shape[0], False, kind, dtype, weight.device)
    if choice.kind == "skinny":
        assert isinstance(choice.config, SkinnyConfig)
        return skinny_8bit(rows, weight, scale, bias, dtype, choice.config)
    if kind == "int8":
        return scale_rows(torch._int_mm(rows.codes, weight.T), rows.scale, scale, bias, dtype)
    return torch._scaled_mm(
        rows.codes,
        weight.T,
        scale_a=rows.scale[:, None],
        scale_b=scale[None, :],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def _row_kernel(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, gated: bool) -> Choice | None:
    """The choice for such rows, if it is a kernel of one row."""
    if x.shape[0] != 1:
        return None
    size_out, size_in = weight.shape
    choice = choose(1, size_in, size_out, gated, kind_of(weight, scale), x.dtype, x.device)
    return choice if choice.kind in ("few_rows", "warps") else None


def _multiply_row(
    choice: Choice,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    act: str | None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row by a kernel of its own; see `row_8bit`."""
    size_in, size_out = x.shape[1], weight.shape[0]
    if choice.kind == "warps":
        assert choice.config is not None and act is None  # else it does not serve
        cut = WarpsConfig(*choice.config)
        return row_8bit_warps(x, weight, scale, bias, input_scale, norm, residual, cut)
    config = fitted(choice.config, size_in, size_out, act is None and norm is None)
    return row_8bit(x, weight, scale, bias, input_scale, act, norm, residual, config)


def takes_gates(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """See `lowbit_ops.takes_gates`."""
    return _row_kernel(x, weight, scale, False) is None


def w8a8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """`lowbit_ops.fp8_linear` or `int8_linear`, by the weight; with scales of blocks `fp8_block_linear`."""
    name = None if act is None else ops.GATED.get(act)
    choice = _row_kernel(x, weight, scale, name is not None)
    if choice is not None:
        out = _multiply_row(choice, x, weight, scale, bias, input_scale, name)[0]
        return out if act is None or name is not None else act(out)
    rows = quantize_rows(x, form_of(weight, scale, input_scale))
    out = multiply(rows, weight, scale, bias, x.dtype)
    return out if act is None else act(out)


fp8_linear = int8_linear = w8a8_linear


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """See `lowbit_ops.fp8_block_linear`."""
    return w8a8_linear(x, weight, scale, bias, None, act)


def rms_norm_w8a8_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    act: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lowbit_ops.rms_norm_w8a8_linear`."""
    name = None if act is None else ops.GATED.get(act)
    choice = _row_kernel(x, weight, scale, name is not None)
    if choice is not None:
        norm = (norm_weight, eps)
        out, stream = _multiply_row(choice, x, weight, scale, bias, input_scale, name, norm, residual)
        return (out if act is None or name is not None else act(out)), stream
    form = form_of(weight, scale, input_scale)
    rows = rms_norm_quantize(x, residual, norm_weight, eps, form)
    out = multiply(rows, weight, scale, bias, x.dtype)
    return (out if act is None else act(out)), (x if residual is None else residual)


def gated_w8a8_linear(
    gates: torch.Tensor,
    act: Activation,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `lowbit_ops.gated_w8a8_linear`."""
    name = ops.GATED.get(act)
    if name is None or not takes_gates(gates, weight, scale):
        return w8a8_linear(act(gates), weight, scale, bias, input_scale)
    rows = gated_quantize(gates, name, form_of(weight, scale, input_scale))
    return multiply(rows, weight, scale, bias, gates.dtype)
