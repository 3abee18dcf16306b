"""Quantized KV caches in plain PyTorch: what the kernels of every device must agree with.

Layouts are `octavo.kv.format.KVFormat`'s. FP8 numbers are those of the OCP 8-bit formats (E4M3 without
infinities, largest 448; E5M2, largest 57344), rounded to nearest even and saturated. INT8 numbers are codes
-127 .. 127 times a float16 scale per token and head, plus a float16 offset if the format has one. Keys may be
stored less a vector that is the same for all of a head's (`octavo.worker.kv_scales`): it adds the same number
to all scores of a row, which softmax doesn't see, so that nobody adds it again.
"""

from __future__ import annotations

import torch

FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FP8_LARGEST = {"fp8": 448.0, "fp8_e5m2": 57344.0}


def quantize_fp8(
    x: torch.Tensor, kind: str, scale: torch.Tensor, centre: torch.Tensor | None = None
) -> torch.Tensor:
    """Codes (uint8, `x`'s shape) of `x` `[rows, heads, dim]`, less `centre` (float32 `[heads, dim]`) if it is
    given, over `scale` (float32 `[heads]`)."""
    largest = FP8_LARGEST[kind]
    x = x.float() if centre is None else x.float() - centre
    scaled = (x / scale[:, None]).clamp(-largest, largest)
    return scaled.to(FP8_DTYPES[kind]).view(torch.uint8)


def dequantize_fp8(codes: torch.Tensor, kind: str, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of codes `[..., heads, block_size, dim]`, `scale` float32 `[heads]`."""
    return codes.view(FP8_DTYPES[kind]).float() * scale[:, None, None]


def quantize_int8(
    x: torch.Tensor, offset: bool, centre: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes (int8, `x`'s shape), scales and offsets (float16, `[rows, heads]`; offsets None without) of `x`
    `[rows, heads, dim]`, less `centre` (float32 `[heads, dim]`) if it is given.

    The scale is rounded to float16 first, so that the codes fit it; a scale that rounds to 0 makes all
    codes 0. Codes are rounded to nearest even.
    """
    x = x.float() if centre is None else x.float() - centre
    shift = ((x.amax(-1) + x.amin(-1)) * 0.5).half() if offset else None
    centred = x if shift is None else x - shift.float()[..., None]
    scale = (centred.abs().amax(-1) * (1 / 127)).half()
    wide = scale.float()[..., None]
    codes = torch.where(wide > 0, centred / wide, 0.0).round().clamp(-127, 127).to(torch.int8)
    return codes, scale, shift


def write_int8(
    x: torch.Tensor,
    cache: torch.Tensor,
    part: int,
    slots: torch.Tensor,
    block_size: int,
    offset: bool,
    centre: torch.Tensor | None = None,
) -> None:
    """Store rows `x` `[rows, heads, dim]` as part 0 (K) or 1 (V) at `slots` (int64 `[rows]`, all >= 0), less
    `centre` (float32 `[heads, dim]`)."""
    dim = x.shape[-1]
    codes, scale, shift = quantize_int8(x, offset, centre)
    block, place = slots // block_size, slots % block_size
    piece = cache[:, part]  # [num_blocks, heads, block_size * (dim + extra)]
    body = piece[..., : block_size * dim].unflatten(-1, (block_size, dim))
    body[block, :, place] = codes.view(torch.uint8)
    tail = piece[..., block_size * dim :].view(torch.float16)
    tail[block, :, place] = scale
    if shift is not None:
        tail[block, :, block_size + place] = shift


def dequantize_int8(blocks: torch.Tensor, block_size: int, dim: int, offset: bool) -> torch.Tensor:
    """float32 `[..., heads, block_size, dim]` of whole pieces `[..., heads, block_size * (dim + extra)]`."""
    codes = blocks[..., : block_size * dim].unflatten(-1, (block_size, dim)).contiguous().view(torch.int8)
    tail = blocks[..., block_size * dim :].contiguous().view(torch.float16).float()
    values = codes.float() * tail[..., :block_size, None]
    return values + tail[..., block_size : 2 * block_size, None] if offset else values
