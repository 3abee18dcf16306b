"""4-bit weights in tiles, the form that GPUs multiply, in plain PyTorch: what kernels must agree with.

Of a matrix of N rows (outputs) and K columns (inputs), K filled up to a multiple of `STEP`:

- `codes` int16 `[K / 128, N, 32]`: nibble i (lowest first) of element j of block b is the code of column
  `128 b + 32 i + j`. So a block's rows follow each other in memory, 64 bytes each, and 32 neighbouring
  columns are the same nibble of neighbouring elements: a register of 32 bits holds pairs of columns that
  tensor cores take in one register, and columns of one group are multiplied together.
- `scales` for every `group` columns (0: for a whole row), either float32 `[groups, N]`, or of a 16-bit type
  (`scale_type`) by twos in int32 `[ceil(groups / 2), N]`, the even group in the lower half.
- `zeros` int32 `[ceil(groups / 8), N]`: nibble g % 8 is group g's zero point (None: 8), of affine codes.
- `table` float32 `[16]` where codes choose from a table instead, and `values`, the same for the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from octavo.kernels.reference_lowbit import Activation, finish, pack_rows, unpack_rows

BLOCK = 128  # columns of a block of codes
SLAB = 32  # columns of one nibble
STEP = 256  # columns that a kernel takes at a time, whose codes are always there

# What QLoRA's table of 4 bits is (arXiv 2305.14314, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

_CHUNK = 16  # blocks that are arranged at a time, so that a matrix needs little room beside it


class Tiles(NamedTuple):
    """A matrix in this form; shapes and types as the module says."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    scale_type: torch.dtype
    table: torch.Tensor | None = None
    values: tuple[float, ...] | None = None

    @property
    def rows(self) -> int:
        """N."""
        return self.codes.shape[1]


def group_of(columns: int, groups: int) -> tuple[int, int]:
    """Columns of a group in tiles, and how many of them make up one of `groups` of a matrix.

    Raises:
        ValueError: groups that are no multiples of `SLAB` columns.
    """
    if groups == 1:
        return 0, 1
    size = columns // groups
    if columns % groups or size % SLAB:
        raise ValueError(f"{columns} columns in {groups} groups: groups must be of multiples of {SLAB}")
    fits = size & -size  # the largest power of 2 that divides it
    if fits >= STEP:
        return size, 1
    return fits, size // fits


def tiles_shapes(
    rows: int, columns: int, groups: int, scale_size: int
) -> tuple[int, tuple[int, int, int], tuple[int, int], tuple[int, int]]:
    """Columns of a group, and the shapes of codes, scales (of `scale_size` bytes each) and zeros."""
    steps = -(-columns // STEP)
    group, parts = group_of(columns, groups)
    groups = 1 if group == 0 else max(groups * parts, steps * STEP // group)
    words = groups if scale_size == 4 else -(-groups // 2)
    return group, (2 * steps, rows, SLAB), (words, rows), (-(-groups // 8), rows)


def make_tiles(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    table: torch.Tensor | None = None,
) -> Tiles:
    """The tiles of a matrix.

    Args:
        qweight: int32 `[K / 8, N]`, as in `octavo.kernels.reference_lowbit`.
        scales: `[groups, N]`, float32 or a type of 16 bits.
        zeros: uint8 `[groups, N]`, or None.
        table: float32 `[16]`: what codes mean, where they are not affine.

    Raises:
        ValueError: see `group_of`.
    """
    columns, rows = 8 * qweight.shape[0], qweight.shape[1]
    group, parts = group_of(columns, scales.shape[0])
    size, shape, scale_shape, zero_shape = tiles_shapes(rows, columns, scales.shape[0], scales.element_size())
    codes = qweight.new_empty(shape, dtype=torch.int16)
    for first in range(0, shape[0], _CHUNK):
        words = qweight[first * BLOCK // 8 : (first + _CHUNK) * BLOCK // 8]
        blocks = min(_CHUNK, shape[0] - first)
        words = F.pad(words, (0, 0, 0, blocks * BLOCK // 8 - words.shape[0]))
        nibbles = unpack_rows(words).to(torch.int32).view(blocks, 4, SLAB, rows)
        joined = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12
        codes[first : first + blocks] = joined.to(torch.int16).transpose(1, 2)
    scales = scales.repeat_interleave(parts, 0)
    kept = scales
    if scales.element_size() == 2:
        kept = _in_words(scales.view(torch.int16).to(torch.int32) & 0xFFFF, 2, scale_shape[0])
    else:
        kept = F.pad(scales, (0, 0, 0, scale_shape[0] - scales.shape[0]))
    if zeros is not None:
        wide = zeros.repeat_interleave(parts, 0)
        zeros = pack_rows(F.pad(wide, (0, 0, 0, 8 * zero_shape[0] - wide.shape[0])))
    values = None if table is None else tuple(float(value) for value in table.tolist())
    return Tiles(codes, kept.contiguous(), zeros, size, scales.dtype, table, values)


def _in_words(parts: torch.Tensor, each: int, words: int) -> torch.Tensor:
    """int32 `[words, N]` of integers of 32 / `each` bits `[n, N]`, the first one lowest."""
    parts = F.pad(parts, (0, 0, 0, words * each - parts.shape[0])).unflatten(0, (words, each))
    return parts[:, 0] | parts[:, 1] << (32 // each)


def dequantize_tiles(tiles: Tiles, columns: int) -> torch.Tensor:
    """float32 `[N, columns]`."""
    shifts = torch.arange(0, 16, 4, device=tiles.codes.device, dtype=torch.int32)
    nibbles = tiles.codes.to(torch.int32)[:, None] >> shifts[:, None, None] & 15  # [blocks, 4, N, SLAB]
    codes = nibbles.permute(2, 0, 1, 3).flatten(1)  # [N, K]
    scales = tiles.scales
    if tiles.scale_type.itemsize == 2:
        halves = torch.stack((scales & 0xFFFF, scales >> 16), 1).flatten(0, 1)
        scales = halves.to(torch.int16).view(tiles.scale_type)
    group = tiles.group or codes.shape[1]
    wide = scales.float().T.repeat_interleave(group, 1)[:, : codes.shape[1]]
    if tiles.table is not None:
        values = tiles.table.float()[codes.long()]
    elif tiles.zeros is None:
        values = (codes - 8).float()
    else:
        zeros = unpack_rows(tiles.zeros).T.repeat_interleave(group, 1)[:, : codes.shape[1]]
        values = (codes - zeros.to(torch.int32)).float()
    return (values * wide)[:, :columns].contiguous()


def tiles_linear(
    x: torch.Tensor, tiles: Tiles, bias: torch.Tensor | None = None, act: Activation | None = None
) -> torch.Tensor:
    """`[rows, K]` times the matrix, with `bias [N]`, to `[rows, N]` of `x`'s dtype, sums in float32; or `act`
    of the rounded product, a gated activation, `[rows, N / 2]`."""
    return finish(x.float() @ dequantize_tiles(tiles, x.shape[1]).T, bias, x.dtype, act)
