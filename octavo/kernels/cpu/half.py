"""Products of float32 or bfloat16 rows with matrices that stay 16-bit floats in memory, in C++; twin:
`octavo.kernels.reference_half`."""

from __future__ import annotations

import ctypes
import functools

import torch

from octavo.kernels.cpu.arena import Arena
from octavo.kernels.cpu.ops import available, differ, library
from octavo.kernels.cpu.products import KernelMatrix

DTYPES = (torch.bfloat16, torch.float16)
_arena = Arena()


class _Matrix(ctypes.Structure):
    """`HalfMatrix` in half.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("is_float16", ctypes.c_int32),
    ]


@functools.cache
def panel() -> int:
    """Rows that the kernels compute side by side: 16 or 32; 0 where there are no such kernels (the CPU has
    neither AVX2 with FMA and F16C nor AVX-512, or the library cannot be built)."""
    return int(library().octavo_half_panel()) if available() else 0


def matrix_bytes(rows: int, columns: int) -> int:
    """Bytes of a `HalfMatrix`."""
    return -(-rows // panel()) * panel() * columns * 2


class HalfMatrix(KernelMatrix):
    """A matrix `[rows, columns]` of bfloat16 or float16 in the layout of the kernels, 2 bytes a number.

    `fill` brings its rows, each once, then `finish` makes those that didn't come zero.
    Products' sums are float32, rounded once; a row's result is the same bits whatever rows stand beside it.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype):
        if dtype not in DTYPES:
            raise TypeError(f"matrices of 16-bit floats are bfloat16 or float16, not {dtype}")
        lib = library()
        self.rows, self.columns, self.dtype = rows, columns, dtype
        self.gates = rows % (2 * panel()) == 0
        #: uint8: the memory that holds it
        self.data, self._chunk = _arena.take(matrix_bytes(rows, columns))
        self._matrix = _Matrix(self.data.data_ptr(), rows, columns, int(dtype is torch.float16))
        self._address = ctypes.addressof(self._matrix)
        self._linear, self._rows = lib.octavo_half_linear, lib.octavo_half_rows
        self._missing = [(0, rows)]  # ranges of rows
        # The last panel's rows beyond the matrix are zero, so that equal matrices are equal bytes. (Not by
        # PyTorch: memory that was taken in inference mode it won't write outside that.)
        last = panel() * columns * 2
        ctypes.memset(self.data.data_ptr() + self.data.nbytes - last, 0, last)

    def fill(self, first: int, piece: torch.Tensor) -> None:
        """Rows from `first` on: `[any, columns]` of the matrix's dtype, on the CPU; copied."""
        if piece.dtype is not self.dtype:
            raise differ(self.data.view(self.dtype), piece)
        if piece.dim() != 2 or piece.shape[1] != self.columns or first + piece.shape[0] > self.rows:
            raise ValueError(
                f"a piece {list(piece.shape)} doesn't fit at row {first} of [{self.rows}, {self.columns}]"
            )
        if piece.stride(1) != 1:
            piece = piece.contiguous()
        end = first + piece.shape[0]
        cut = [((a, min(b, first)), (max(a, end), b)) for a, b in self._missing]
        self._missing = [(a, b) for pair in cut for a, b in pair if a < b]
        library().octavo_half_pack(self._address, piece.data_ptr(), piece.shape[0], piece.stride(0), first)

    def finish(self) -> None:
        """Make the rows zero that `fill` brought nothing for."""
        for first, end in self._missing:
            self.fill(first, torch.zeros(end - first, self.columns, dtype=self.dtype))

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, `ids` integer `[n]`, all below `rows` (not checked): float32 `[n, columns]`."""
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(len(ids), self.columns)
        self._rows(self._address, ids.data_ptr(), len(ids), out.data_ptr(), torch.get_num_threads())
        return out

    def equals(self, other: HalfMatrix) -> bool:
        """Whether both hold the same numbers in the same type."""
        same = self.rows == other.rows and self.columns == other.columns and self.dtype is other.dtype
        return same and torch.equal(self.data, other.data)
