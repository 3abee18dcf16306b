"""Weights rounded to nearest, in the tensors that compressed-tensors stores.

Scales are what compressed-tensors' own rounding has: the largest magnitude over half of the codes' range
(448 for FP8, 127.5 for int8, 7.5 for int4).

Groups of 4 bits may take another one. Their codes reach from -8 to 7, so that the largest magnitude is best
given to -8, by a scale below 0 where that number is above it (as llama.cpp's Q4_0 and AutoRound have it):
steps are a sixteenth shorter. Of such scales, and the plain one, a group takes the one of least sum of fourth
powers of errors. Squares would clip large weights for the sake of many small ones, which costs some models
more than it gains (`benchmarks/quantization.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from octavo.errors import ModelError
from octavo.kernels.reference_lowbit import FP8, FP8_BLOCK, FP8_LARGEST
from octavo.quantization.scheme import WeightScheme

_STEP = 1 << 20  # numbers that are rounded at a time: 4 MiB as float32, few times that in all
_GPU_STEP = 1 << 24  # on a GPU, where each operation has to be launched
_HALF_RANGE = {"fp8": FP8_LARGEST, "int8": 127.5, "int4": 7.5}
_GROUPS = (128, 64, 32)
THOROUGH = tuple(round(7.4 + 0.2 * i, 1) for i in range(10))
"""Multiples of a scale that a group's largest magnitude is made for 4 bits, where time is plenty: beyond 8.5
it is clipped."""
QUICK = (8.0,)
"""The same while a model is loaded; in what was measured no worse, but for errors of weights."""


def fitted(scheme: WeightScheme, columns: int) -> WeightScheme:
    """The scheme for a matrix of so many columns: groups of 64 or 32 where the scheme's don't divide them.

    Raises:
        ModelError: none of these does.
    """
    if scheme.group_size is None or columns % scheme.group_size == 0:
        return scheme
    for size in _GROUPS:
        if size < scheme.group_size and columns % size == 0:
            return replace(scheme, group_size=size)
    raise ModelError(
        f"a matrix of {columns} columns cannot be quantized in groups of {scheme.group_size}, 64 or 32: "
        "choose weights of 8 bits"
    )


def round_matrix(
    name: str,
    weight: torch.Tensor,
    scheme: WeightScheme,
    *,
    packed: bool,
    device: torch.device,
    scale_dtype: torch.dtype = torch.float32,
    ends: Sequence[float] = (),
) -> dict[str, torch.Tensor]:
    """The tensors of a matrix; some rows at a time, so that little more than them is in memory.

    Args:
        name: of the matrix, for messages.
        weight: `[N, K]`, any float type and device.
        scheme: symmetric, of fp8, int8 or int4; its groups divide K.
        packed: "pack-quantized" rather than codes in a type of their own.
        device: where the tensors are made.
        scale_dtype: of scales. Codes are the nearest for the scales as rounded to it.
        ends: of these multiples of a scale, and the plain one, the largest magnitude of each group of int4 is
            made that of least error; without any, and in other schemes, scales are the plain ones.

    Returns:
        `weight` float8_e4m3fn or int8 `[N, K]`, or `weight_packed` int32 `[N, K / 8]` (4 bits) or
        `[N, K / 4]` with `weight_shape` int64 `[2]`; and `weight_scale`: `[1]`, `[N, 1]`, `[N, K / group]`,
        or `[ceil(N / 128), ceil(K / 128)]`.

    Raises:
        ModelError: the matrix holds a NaN or an infinity.
    """
    rows, columns = weight.shape
    whole = None
    if scheme.strategy == "tensor":
        largest = torch.stack([part.abs().amax() for _, part in _slices(weight, device, 1)]).amax()
        whole = _scale(_finite(name, largest.reshape(1)), _HALF_RANGE[scheme.kind], scale_dtype)
    codes: torch.Tensor | None = None
    scales = []
    for first, part in _slices(weight, device, FP8_BLOCK if scheme.strategy == "block" else 1):
        scale = whole
        if scale is None:
            largest = _finite(name, _largest(part, scheme))
            scale = _best(part, largest, scheme, scale_dtype, ends)
            scales.append(scale)
        rounded = _codes(part, spread(scale, scheme, *part.shape), scheme)
        if packed:
            rounded = pack(rounded, scheme.bits)
        if codes is None:
            codes = torch.empty(rows, rounded.shape[1], dtype=rounded.dtype, device=device)
        codes[first : first + len(rounded)] = rounded
    assert codes is not None, "a matrix has rows"
    found = {"weight_scale": torch.cat(scales) if whole is None else whole}
    if packed:
        return {"weight_packed": codes, **found, "weight_shape": torch.tensor([rows, columns])}
    return {"weight": codes, **found}


def spread(scale: torch.Tensor, scheme: WeightScheme, rows: int, columns: int) -> torch.Tensor:
    """The scale of each number, in float32, in a shape that broadcasts to `[rows, columns]`."""
    scale = scale.float()
    if scheme.strategy == "block":
        wide = scale.repeat_interleave(FP8_BLOCK, 0)[:rows]
        return wide.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    if scheme.strategy == "group":
        return scale.repeat_interleave(columns // scale.shape[1], 1)
    return scale


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[N, K / 8]` or `[N, K / 4]` of int8 codes `[N, K]` of 4 or 8 bits: made unsigned, the first
    in the lowest bits."""
    unsigned = (codes.short() + (1 << bits - 1)).to(torch.uint8)
    if bits == 4:
        unsigned = unsigned[:, ::2] | (unsigned[:, 1::2] << 4)
    return unsigned.contiguous().view(torch.int32)


def _slices(weight: torch.Tensor, device: torch.device, multiple: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows in float32 on the device) of some rows at a time, but for the last a `multiple`."""
    rows, columns = weight.shape
    most = _STEP if device.type == "cpu" else _GPU_STEP
    step = max(1, most // columns // multiple) * multiple
    for first in range(0, rows, step):
        part = weight[first : first + step]
        kept = torch.empty(part.shape, dtype=part.dtype, device=device)
        yield first, kept.copy_(part).float()


def _largest(part: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """The largest magnitudes, in the shape of the scales."""
    magnitudes = part.abs()
    if scheme.strategy == "channel":
        return magnitudes.amax(1, keepdim=True)
    if scheme.strategy == "group":
        assert scheme.group_size is not None
        return magnitudes.unflatten(1, (-1, scheme.group_size)).amax(2)
    rows, columns = part.shape
    padded = F.pad(magnitudes, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    return padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK)).amax((1, 3))


def _finite(name: str, largest: torch.Tensor) -> torch.Tensor:
    bad = ~torch.isfinite(largest)
    if bool(bad.any()):
        raise ModelError(
            f"{name} holds {float(largest[bad][0]):g}, which cannot be quantized: the checkpoint is corrupt, "
            "fetch it again"
        )
    return largest


def _scale(largest: torch.Tensor, end: float, dtype: torch.dtype) -> torch.Tensor:
    """That of which the largest magnitudes are `end` times."""
    limits = torch.finfo(dtype)
    scale = (largest / end).clamp(limits.tiny, limits.max).to(dtype)
    # Of nothing but zeros any scale is right; this is compressed-tensors'.
    return torch.where(largest == 0, torch.full_like(scale, limits.eps), scale)


def _codes(part: torch.Tensor, scale: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """float8_e4m3fn or int8, in the shape of `part`; `scale` as `spread` gives it."""
    if scheme.kind == "fp8":
        return (part / scale).clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8)
    return _integers(part, scale, scheme.bits).to(torch.int8)


def _integers(part: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    most = (1 << bits - 1) - 1
    return (part / scale).round_().clamp_(-most - 1, most)


def _best(
    part: torch.Tensor,
    largest: torch.Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
    ends: Sequence[float],
) -> torch.Tensor:
    """The scales of least error: the plain ones, or for int4 such as make the largest magnitudes -`ends`."""
    best = _scale(largest, _HALF_RANGE[scheme.kind], dtype)
    if scheme.kind != "int4" or not ends:
        return best
    groups = part.unflatten(1, (largest.shape[1], -1))
    above = groups.amax(2) > -groups.amin(2)
    least = _error(groups, best)
    for end in ends:
        scale = _scale(largest, end, dtype)
        scale = torch.where(above, -scale, scale)
        error = _error(groups, scale)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _error(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of int4 codes for scales `[rows, groups]` from `[rows, groups, columns]`: sums of fourth powers."""
    wide = scale.float()[:, :, None]
    return _integers(groups, wide, 4).mul_(wide).sub_(groups).square_().square_().sum(2)
