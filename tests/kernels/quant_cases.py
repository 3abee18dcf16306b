"""Random quantized matrices of every format that the CPU's kernels take."""

from __future__ import annotations

import torch

from octavo.kernels.reference_quant import INT8, QuantFormat, QuantizedMatrix

FORMATS = {
    "q4": QuantFormat(4, 32, False, 8),
    "q4-minimum": QuantFormat(4, 32, True, 0),
    "q5": QuantFormat(5, 32, False, 16),
    "q5-minimum": QuantFormat(5, 32, True, 0),
    "q8": INT8,
    "q4-group16": QuantFormat(4, 16, False, 4),
    "q4-group16-minimum": QuantFormat(4, 16, True, 0),
    "q6-group16": QuantFormat(6, 16, False, 32),
}


def numbers(fmt: QuantFormat, rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    """Any q of the format, its extremes among them."""
    low, high = (-128, 128) if fmt.bits == 8 else (0, 1 << fmt.bits)
    q = torch.randint(low, high, (rows, columns), generator=random)
    q[:, ::7], q[:, 3::11] = low, high - 1
    return q.to(torch.int8 if fmt.bits == 8 else torch.uint8)


def matrix(fmt: QuantFormat, rows: int, columns: int, random: torch.Generator) -> QuantizedMatrix:
    """Random numbers, scales and minima."""
    groups = (rows, columns // fmt.group)
    scale = (torch.rand(groups, generator=random) * 0.02).half()
    minimum = (torch.randn(groups, generator=random) * 0.1).half() if fmt.has_minimum else None
    return QuantizedMatrix(fmt, numbers(fmt, rows, columns, random), scale, minimum)


def exact(fmt: QuantFormat, rows: int, columns: int, random: torch.Generator) -> QuantizedMatrix:
    """Scales that are small powers of two and minima that are small integers: with an x of integers, whose
    blocks reach 127, float32 holds every partial sum exactly, in any order."""
    groups = (rows, columns // fmt.group)
    scale = (2.0 ** -torch.randint(0, 2, groups, generator=random)).half()
    minimum = torch.randint(-8, 9, groups, generator=random).half() if fmt.has_minimum else None
    return QuantizedMatrix(fmt, numbers(fmt, rows, columns, random), scale, minimum)


def exact_rows(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    """Integers up to 127, which every block of 32 reaches, so that its scale is 1."""
    x = torch.randint(-127, 128, (rows, columns), generator=random).float()
    x[:, ::32] = 127.0
    return x
