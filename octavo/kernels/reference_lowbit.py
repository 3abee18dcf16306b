"""Products with weights of 8 and 4 bits in plain PyTorch: what the kernels of every device must agree with.

Forms of a matrix of N rows (outputs) and K columns (inputs):

- fp8: `weight` float8_e4m3fn `[N, K]`, `scale` float32 `[N]`, or `[ceil(N / 128), ceil(K / 128)]` for blocks.
- int8: `weight` int8 `[N, K]`, `scale` float32 `[N]`, or `[N, K / group]` where activations stay as they are.
- int4: `qweight` int32 `[K / 8, N]`, nibble i (lowest first) of row r is the code of column 8 r + i, from 0
  to 15; `scales` `[K / group, N]`; `zeros` int32 `[K / group, N / 8]`, nibble i of word c is the zero point
  of row 8 c + i (None: 8); `perm` int32 `[K]`: row k of the codes is column `perm[k]` of x (None: k). With
  `perm` there may be more rows than x has columns, those beyond of weight 0.
- nf4: `qweight` as of int4, `scales` float32 `[K / group, N]`, `codebook` float32 `[16]`.

Where activations are quantized, codes are multiplied exactly and added up in float32, scales come after.
`act`, where given, is a gated activation (`[rows, N]` to `[rows, N / 2]`) of the rounded product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
INT8_LARGEST = 127.0
FP8_BLOCK = 128
LEAST = 1e-10  # the largest magnitude of a row is taken as this much at least, so that no scale is 0


def quantize_rows_fp8(
    x: torch.Tensor, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in FP8, rounded to nearest even and saturated.

    Args:
        x: `[rows, K]`, float32, bfloat16 or float16.
        input_scale: float32 `[1]`, of every row; None: each row's largest magnitude / 448.

    Returns:
        Codes float8_e4m3fn `[rows, K]` and scales float32 `[rows]`. A row that holds a NaN has a scale of
        NaN, one that holds an infinity a scale of infinity.
    """
    scale = _row_scales(x, FP8_LARGEST, input_scale)
    return _fp8(x.float() / scale[:, None]), scale


def quantize_rows_int8(
    x: torch.Tensor, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in int8 from -127 to 127, rounded to nearest even; as `quantize_rows_fp8`, with 127 for 448.

    With a scale that is given, codes go down to -128.
    """
    scale = _row_scales(x, INT8_LARGEST, input_scale)
    least = -INT8_LARGEST if input_scale is None else -INT8_LARGEST - 1
    codes = (x.float() / scale[:, None]).round_().clamp_(least, INT8_LARGEST)
    return codes.nan_to_num_(0.0).to(torch.int8), scale


def quantize_groups_fp8(x: torch.Tensor, group: int = FP8_BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in FP8 with a scale for every `group` columns; the last group may be shorter.

    Returns:
        Codes float8_e4m3fn `[rows, K]` and scales float32 `[rows, ceil(K / group)]`.
    """
    rows, columns = x.shape
    groups = F.pad(x.float(), (0, -columns % group)).unflatten(1, (-1, group))
    scale = _over(groups.abs().amax(2).clamp_min(LEAST), FP8_LARGEST)
    codes = _fp8(groups / scale[:, :, None]).flatten(1)
    return codes[:, :columns].contiguous(), scale


def _row_scales(x: torch.Tensor, largest: float, given: torch.Tensor | None) -> torch.Tensor:
    if given is not None:
        return given.float().reshape(1).expand(x.shape[0])
    return _over(x.float().abs().amax(1).clamp_min(LEAST), largest)


def _over(x: torch.Tensor, number: float) -> torch.Tensor:
    """`x / number` as a division: on a GPU PyTorch multiplies with a number's reciprocal instead."""
    return x / x.new_full((), number)


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """W8A8 in FP8: `[rows, K]` to `[rows, N]` of `x`'s dtype.

    Args:
        x: float32, bfloat16 or float16.
        weight: float8_e4m3fn `[N, K]`.
        scale: float32 `[N]`.
        bias: `[N]` or None.
        input_scale: see `quantize_rows_fp8`.
    """
    return _w8a8(*quantize_rows_fp8(x, input_scale), weight, scale, bias, x.dtype, act)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """W8A8 in int8; as `fp8_linear`, with `weight` int8 and sums of integers."""
    return _w8a8(*quantize_rows_int8(x, input_scale), weight, scale, bias, x.dtype, act)


def _w8a8(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    act: Activation | None,
) -> torch.Tensor:
    if weight.dtype is torch.int8:  # float64 holds sums of integers exactly
        out = (codes.double() @ weight.double().T).float()
    else:
        out = codes.float() @ weight.float().T
    return finish(out * x_scale[:, None] * scale, bias, dtype, act)


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """W8A8 in FP8 with a scale for every 128 x 128 weights, and for every 128 columns of a row of x.

    Args:
        x: `[rows, K]`.
        weight: float8_e4m3fn `[N, K]`.
        scale: float32 `[ceil(N / 128), ceil(K / 128)]`.
        bias: `[N]` or None.
    """
    codes, x_scale = quantize_groups_fp8(x)
    out = x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    for group in range(scale.shape[1]):
        columns = slice(group * FP8_BLOCK, (group + 1) * FP8_BLOCK)
        product = codes[:, columns].float() @ weight[:, columns].float().T
        of_rows = scale[:, group].repeat_interleave(FP8_BLOCK)[: weight.shape[0]]
        out += product * x_scale[:, group, None] * of_rows
    return finish(out, bias, x.dtype, act)


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation | None = None,
) -> torch.Tensor:
    """W8A16: weights of 8 bits, activations as they are.

    Args:
        x: `[rows, K]`.
        weight: float8_e4m3fn or int8 `[N, K]`.
        scale: float32 `[N]`, `[N, K / group]`, or of blocks (`dequantize_8bit`).
        bias: `[N]` or None.
    """
    return finish(x.float() @ dequantize_8bit(weight, scale).T, bias, x.dtype, act)


def dequantize_8bit(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 `[N, K]` of float8_e4m3fn or int8 `[N, K]` and scales `[N]`, `[N, K / group]`, or (where those
    have fewer rows than the matrix) `[ceil(N / 128), ceil(K / 128)]`."""
    rows, columns = weight.shape
    wide = weight.float()
    if scale.dim() == 1:
        return wide.mul_(scale[:, None])
    if scale.shape[0] == rows:
        return wide.mul_(scale.repeat_interleave(columns // scale.shape[1], 1))
    blocks = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return wide.mul_(blocks)


def unpack_rows(qweight: torch.Tensor) -> torch.Tensor:
    """uint8 codes `[8 R, N]` of int32 `[R, N]`: nibble i of row r is row 8 r + i."""
    shifts = torch.arange(0, 32, 4, device=qweight.device, dtype=torch.int32)
    return ((qweight[:, None, :] >> shifts[:, None]) & 15).to(torch.uint8).flatten(0, 1)


def pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """int32 `[K / 8, N]` of integer codes 0 .. 15 `[K, N]`; the inverse of `unpack_rows`."""
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int64)
    words = (codes.long().unflatten(0, (-1, 8)) << shifts[:, None]).sum(1)
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)


def unpack_columns(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 codes `[G, 8 C]` of int32 `[G, C]`: nibble i of word c is column 8 c + i."""
    return unpack_rows(zeros.T).T


def pack_columns(codes: torch.Tensor) -> torch.Tensor:
    """int32 `[G, N / 8]` of integer codes 0 .. 15 `[G, N]`; the inverse of `unpack_columns`."""
    return pack_rows(codes.T).T.contiguous()


def dequantize_int4(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 `[N, K]`, columns in x's order."""
    grouped = _grouped_int4(qweight, scales, zeros).T
    return grouped if perm is None else in_order(grouped, perm)


def in_order(grouped: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """`[N, K]` with columns in x's order, from those in the codes' order."""
    wide = perm.long()
    out = grouped.new_zeros(grouped.shape[0], int(wide.max()) + 1)  # every column of x has its own
    return out.index_add_(1, wide, grouped)


def _grouped_int4(qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """float32 `[K, N]`, rows in the codes' order."""
    codes = unpack_rows(qweight).float().unflatten(0, (scales.shape[0], -1))
    zero = 8.0 if zeros is None else unpack_columns(zeros).float()[:, None, :]
    return ((codes - zero) * scales.float()[:, None, :]).flatten(0, 1)


def dequantize_nf4(qweight: torch.Tensor, scales: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """float32 `[N, K]`."""
    values = codebook.float()[unpack_rows(qweight).long()].unflatten(0, (scales.shape[0], -1))
    return (values * scales.float()[:, None, :]).flatten(0, 1).T


def finish(
    out: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, act: Activation | None
) -> torch.Tensor:
    """A product's bias, rounding and activation."""
    out = (out if bias is None else out + bias.float()).to(dtype)
    return out if act is None else act(out)
