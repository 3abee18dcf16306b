"""Matrices that stay quantized, in the form that this machine multiplies."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from octavo.kernels.cpu import ops, quant
from octavo.kernels.reference_quant import BLOCK, PlainMatrix, QuantFormat, QuantizedMatrix

logger = logging.getLogger(__name__)

Matrix = quant.PackedMatrix | PlainMatrix


@functools.cache
def has_kernels() -> bool:
    """Whether the CPU's kernels for quantized matrices run here (AVX2 and a C++ compiler)."""
    return quant.lanes() > 0


@functools.cache
def _announce() -> None:
    reason = ops.why_not() or "the CPU has no AVX2"
    logger.warning("no kernels for quantized weights (%s): plain PyTorch multiplies them, slowly", reason)


def make_matrix(parts: list[QuantizedMatrix], columns: int) -> Matrix:
    """A matrix of parts, each some of its rows, for x of `columns` columns.

    Without kernels plain PyTorch serves, and one warning says so.
    """
    if has_kernels():
        return quant.PackedMatrix(parts, columns)
    _announce()
    return PlainMatrix(parts, columns)


def matrix_bytes(parts: Sequence[tuple[int, QuantFormat]], columns: int) -> int:
    """Bytes of what `make_matrix` makes of parts of so many rows, each in its format."""
    padded = -(-columns // BLOCK) * BLOCK
    if has_kernels():
        return sum(quant.packed_bytes(rows, form, padded) for rows, form in parts)
    scales = sum(rows * (padded // form.group) * (1 + form.has_minimum) for rows, form in parts)
    return sum(rows for rows, _ in parts) * padded + 2 * scales
