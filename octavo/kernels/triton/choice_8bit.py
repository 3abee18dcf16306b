"""Which kernel multiplies rows of 8 bits, and how it is cut: looked up in tables as `linear_choice`'s, those
of `tuned/fp8`, `tuned/fp8_block` and `tuned/int8`, or by rules where nothing was measured."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from octavo.kernels.reference_lowbit import FP8_BLOCK
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.linear_choice import Chip, Choice, Shape, load_table, look_up
from octavo.kernels.triton.skinny_linear import SkinnyConfig

Kind8 = Literal["fp8", "fp8_block", "int8"]

# Rows from which the library's product is taken where nothing was measured, and weights up to which one row
# has a kernel of its own: larger matrices are read faster by the tensor cores' (measured on an H200).
_MANY_ROWS = 192
_ONE_ROW = 8 << 20
# torch._int_mm wants more than 16 rows; sizes must be multiples of what 16 bytes hold.
_ALIGNED = 16


def default_config(rows: int, shape: Shape, kind: Kind8, chip: Chip) -> SkinnyConfig:
    """A sane cut: tiles of the 64 outputs that Hopper multiplies at once, programs enough, bytes enough in
    flight; for many rows large tiles."""
    if rows > 128:
        stages = 3 if chip.shared_memory >= 3 * (128 + 128) * 128 else 2
        return SkinnyConfig(128, 128, stages, 8, 1, 0, False, 128)
    block_rows = max(16, power_of_2(rows))
    block_in = 256 if block_rows <= 32 and kind != "fp8_block" else FP8_BLOCK
    while block_in > max(32, power_of_2(shape.size_in)) and kind != "fp8_block":
        block_in //= 2
    programs = ceil_div(shape.size_out, 64)
    splits = 1
    while splits < 8 and 3 * programs * splits <= 4 * chip.multiprocessors:
        if shape.size_in < 2 * splits * 4 * block_in:
            break
        splits *= 2
    stage = (64 + block_rows) * block_in
    stages = max(2, min(6, (chip.shared_memory // 2 - 1024) // stage))
    return SkinnyConfig(64, block_in, stages, 4, splits, 32, block_rows <= 64, block_rows)


def library_serves(rows: int, shape: Shape, kind: Kind8, dtype: torch.dtype) -> bool:
    """Whether PyTorch's own product takes such rows: `torch._scaled_mm` with scales of rows gives bfloat16,
    `torch._int_mm` wants more than 16."""
    if shape.size_in % _ALIGNED or shape.size_out % _ALIGNED or kind == "fp8_block":
        return False
    return dtype is torch.bfloat16 if kind == "fp8" else rows > 16


def default_choice(rows: int, shape: Shape, kind: Kind8, chip: Chip, dtype: torch.dtype) -> Choice:
    """What is taken where nothing was measured."""
    if rows == 1 and shape.size_in * shape.size_out <= _ONE_ROW:
        return Choice("few_rows")
    # `torch._int_mm` was slower than our kernel at every number of rows.
    if rows >= _MANY_ROWS and kind == "fp8" and library_serves(rows, shape, kind, dtype):
        return Choice("cublas")
    return Choice("skinny", default_config(rows, shape, kind, chip))


@functools.cache
def choose(
    rows: int,
    size_in: int,
    size_out: int,
    gated: bool,
    kind: Kind8,
    dtype: torch.dtype,
    device: torch.device,
) -> Choice:
    """The kernel for `[rows, size_in]` times a matrix `[size_out, size_in]` of 8 bits.

    Args:
        gated: the product of one row goes through a gated activation, with which a kernel of its own ends.
        kind: of the codes.
        dtype: of the result.
        device: a CUDA device; any other counts as one with few multiprocessors (Triton's interpreter).

    Returns:
        "few_rows" (`row_8bit`) or "warps" (`row_8bit_warps`) for one row, "skinny" (`skinny_8bit`), or
        "cublas": PyTorch's own product.
    """
    shape = Shape(size_in, size_out, gated and rows == 1)
    if device.type != "cuda":
        return default_choice(rows, shape, kind, Chip(4, 227 << 10), dtype)
    properties = torch.cuda.get_device_properties(device)
    chip = Chip(properties.multi_processor_count, properties.shared_memory_per_multiprocessor - 1024)
    found = look_up(load_table(properties.name, kind), rows, shape)
    if found is None or not _serves(found, rows, shape, kind, dtype):
        return default_choice(rows, shape, kind, chip, dtype)
    return found


def _serves(choice: Choice, rows: int, shape: Shape, kind: Kind8, dtype: torch.dtype) -> bool:
    """Whether what was measured for some shape and bfloat16 serves this one."""
    if choice.kind == "cublas":
        return library_serves(rows, shape, kind, dtype)
    if choice.kind == "skinny":
        return shape.size_in % 16 == 0  # else there are no asynchronous copies
    if choice.kind == "warps":
        return rows == 1 and not shape.gated and kind != "fp8_block"
    return rows == 1
