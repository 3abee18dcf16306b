"""Products with quantized matrices in C++; twin: `octavo.kernels.reference_quant`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from octavo.kernels.cpu.arena import Arena
from octavo.kernels.cpu.ops import available, dtype_code, library
from octavo.kernels.cpu.products import KernelMatrix
from octavo.kernels.reference_quant import BLOCK, QuantFormat, QuantizedMatrix

CODE_BYTES = 2
"""Of each number of the rows that are multiplied, while they are (`XBlock` in quant_rows.h)."""
_arena = Arena()


class _Part(ctypes.Structure):
    """`QuantPart` in quant.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("has_minimum", ctypes.c_int32),
        ("zero", ctypes.c_int32),
    ]


class _Matrix(ctypes.Structure):
    """`QuantMatrix` in quant.h."""

    _fields_ = [
        ("parts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
    ]


def lanes() -> int:
    """Rows that the kernels compute side by side: 8 or 16; 0 where there are no such kernels (the CPU has
    no AVX2, or the library cannot be built)."""
    return int(library().octavo_quant_lanes()) if available() else 0


def _describe(part: _Part, rows: int, fmt: QuantFormat) -> None:
    part.rows = rows
    part.bits, part.group, part.has_minimum, part.zero = fmt.bits, fmt.group, fmt.has_minimum, fmt.zero


def _bytes_of(part: _Part, padded: int) -> int:
    nbytes = int(library().octavo_quant_bytes(ctypes.byref(part), padded))
    if nbytes < 0:
        raise ValueError(f"no kernel for {part.bits} bits in groups of {part.group}")
    return nbytes


def packed_bytes(rows: int, fmt: QuantFormat, padded: int) -> int:
    """Bytes of one part of a `PackedMatrix`, `padded` columns a multiple of 32."""
    part = _Part()
    _describe(part, rows, fmt)
    return _bytes_of(part, padded)


class PackedMatrix(KernelMatrix):
    """One matrix of one or several parts, each some of its rows, in the layout of the kernels, which multiply
    it with the rows' 8-bit forms.

    Args:
        parts: in the order of their rows, with equal columns; not kept.
        columns: of x; what a part has beyond is padding.
    """

    def __init__(self, parts: Sequence[QuantizedMatrix], columns: int):
        lib = library()
        self.columns = columns
        self.rows = sum(part.q.shape[0] for part in parts)
        padded = -(-columns // BLOCK) * BLOCK
        self._data: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []  # that the data lie in
        self._parts = (_Part * len(parts))()
        target = 0
        for part, packed in zip(parts, self._parts, strict=True):
            rows, fmt = part.q.shape[0], part.format
            if part.q.shape[1] != padded:
                raise ValueError(f"a part has {part.q.shape[1]} columns, not {padded}")
            _describe(packed, rows, fmt)
            packed.target = target
            data, chunk = _arena.take(_bytes_of(packed, padded))
            packed.data = data.data_ptr()
            q, scale = part.q.contiguous(), part.scale.contiguous()
            minimum = None if part.minimum is None else part.minimum.contiguous()
            lib.octavo_quant_pack(
                ctypes.byref(packed),
                padded,
                q.data_ptr(),
                scale.data_ptr(),
                0 if minimum is None else minimum.data_ptr(),
                data.data_ptr(),
                torch.get_num_threads(),
            )
            self._data.append(data)
            self._chunks.append(chunk)
            target += rows
        self._matrix = _Matrix(ctypes.addressof(self._parts), len(parts), self.rows, columns, padded // BLOCK)
        self._address = ctypes.addressof(self._matrix)
        self._linear = lib.octavo_quant_linear
        self.gates = len(parts) == 1 and self.rows % (2 * lanes()) == 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory that holds it, uint8."""
        return self._data

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the matrix, `ids` integer `[n]`, all below `rows` (not checked): `[n, columns]` in `dtype`
        (float32 or bfloat16)."""
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(len(ids), self.columns, dtype=dtype)
        library().octavo_quant_rows(
            self._address, ids.data_ptr(), len(ids), out.data_ptr(), dtype_code(out), torch.get_num_threads()
        )
        return out

    def equals(self, other: PackedMatrix) -> bool:
        """Whether both store the same numbers."""
        if len(self._parts) != len(other._parts) or self.rows != other.rows:
            return False
        same = all(
            getattr(a, name) == getattr(b, name)
            for a, b in zip(self._parts, other._parts, strict=True)
            for name in ("rows", "bits", "group", "has_minimum", "zero")
        )
        return same and all(torch.equal(a, b) for a, b in zip(self._data, other._data, strict=True))
