"""Products with a matrix in oneDNN's own layout, on CPUs."""

from __future__ import annotations

import bisect

import torch
import torch.nn.functional as F

# Rows that oneDNN lays a packed matrix out for. One layout serves all sizes: of those for 1, 32 and 512
# rows it was the fastest, or within noise of it, at every number of rows.
_PACK_ROWS = 32
# oneDNN makes and keeps code for every number of rows that it meets: 1 MB and some milliseconds for each, of
# every shape of matrix. A server meets hundreds, so more than 16 rows are padded to few sizes, four for each
# power of 2.
SIZES = (*range(1, 17), *(quarters << octave for octave in range(2, 9) for quarters in (5, 6, 7, 8)))


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A matrix `[out, in]` in oneDNN's layout (an opaque tensor)."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` with the matrix that was packed: `[rows, in]` to `[rows, out]`."""
    rows = x.shape[0]
    if rows > SIZES[-1]:
        return torch.cat([packed_linear(piece, packed, bias) for piece in x.split(SIZES[-1])])
    if not rows:
        return x.new_empty(0, packed.shape[0])
    size = SIZES[bisect.bisect_left(SIZES, rows)]
    if size == rows:
        return _product(x, packed, bias)
    return _product(F.pad(x, (0, 0, 0, size - rows)), packed, bias)[:rows]


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
