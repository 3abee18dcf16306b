"""How products with weights of 8 and 4 bits are cut: looked up, never tuned at run time.

`tuned/weight_only/` has a table for each kind of chip that was measured (`benchmarks/weight_only_gpu.py`
writes them):

    {"chip": "NVIDIA H200", "serves": ["h200", …],
     "shapes": [{"form": "int4", "in": 4096, "out": 6144, "gated": false,
                 "rows": {"1": [64, 4, 2, 2, 16, 8], "128": null}}]}

`out` counts the matrix's rows, both halves where `gated`. A cut of int4 and nf4 is a `TilesConfig`, of int8
and fp8 a `SkinnyConfig`, of "int4 row" and "int4 norm" (one row, and one behind a norm; so of nf4) a
`RowConfig`. It holds for as many rows as it says and for fewer, down to the one before it. Null: the matrix
is expanded, and cuBLAS multiplies; behind a norm: this has a kernel of its own. A row by itself without an
activation may have `["warps", …]` with a `WarpsConfig`: for this shape alone, as what programs hold, and how
many they are, depends on it. Shapes near to it have the next cut.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.kernels.reference_tiles import STEP
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.linear_choice import Shape
from octavo.kernels.triton.skinny_linear import MAX_ROWS as SKINNY_ROWS
from octavo.kernels.triton.skinny_linear import SkinnyConfig
from octavo.kernels.triton.tiles import TilesConfig
from octavo.kernels.triton.tiles_row import RowConfig
from octavo.kernels.triton.tiles_row_warps import WarpsConfig

Cuts = dict[int, "list[Any] | None"]  # by rows
Table = dict[tuple[str, Shape], Cuts]  # by form of weights, too

# How far a shape may be from one that was measured, in factors of 2 of its sides together.
_NEAR = 2.0


def table_to_json(table: Table, chip: str, serves: list[str]) -> str:
    """The file of a table, a line for each shape."""
    lines = []
    for (form, shape), cuts in table.items():
        rows = {str(n): cuts[n] for n in sorted(cuts)}
        entry = {"form": form, "in": shape.size_in, "out": shape.size_out, "gated": shape.gated, "rows": rows}
        lines.append(json.dumps(entry))
    head = json.dumps({"chip": chip, "serves": serves})[:-1]
    return f'{head}, "shapes": [\n' + ",\n".join(lines) + "\n]}\n"


def table_from_json(data: dict[str, Any]) -> Table:
    """The table of a file that was parsed."""
    return {
        (entry["form"], Shape(entry["in"], entry["out"], entry["gated"])): {
            int(rows): cut for rows, cut in entry["rows"].items()
        }
        for entry in data["shapes"]
    }


@functools.cache
def load_table(chip: str) -> Table:
    """The table that serves a chip of this name; an empty one if there is none."""
    words = chip.lower().split()
    for path in sorted((Path(__file__).parent / "tuned" / "weight_only").glob("*.json")):
        data = json.loads(path.read_text())
        if any(word in words for word in data["serves"]):
            return table_from_json(data)
    return {}


def _of_warps(cut: list[Any] | None) -> bool:
    return cut is not None and cut[0] == "warps"


def look_up(table: Table, form: str, rows: int, shape: Shape) -> tuple[bool, list[Any] | None]:
    """Whether there is something for a shape, or else for one near to it, and the cut."""

    def distance(key: tuple[str, Shape]) -> float:
        other_form, other = key
        if other_form != form or other.gated != shape.gated:
            return math.inf
        return sum(abs(math.log2(a / b)) for a, b in zip(shape[:2], other[:2], strict=True))

    nearest = min(table, key=distance, default=None)
    if nearest is None or distance(nearest) > _NEAR:
        return False, None
    cuts = table[nearest]
    serving = (n for n, cut in cuts.items() if not _of_warps(cut) or nearest == (form, shape))
    bucket = min((n for n in serving if n >= rows), default=None)
    return (False, None) if bucket is None else (True, cuts[bucket])


def _measured(form: str, rows: int, shape: Shape, device: torch.device) -> tuple[bool, list[Any] | None]:
    if device.type != "cuda":
        return False, None
    return look_up(load_table(torch.cuda.get_device_properties(device).name), form, rows, shape)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Those of a GPU; few of any other device (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# Rows beyond which expanding the matrix for cuBLAS (it is written, and read again) is taken to cost less than
# making numbers of codes anew for every tile of rows.
_KERNEL_ROWS = 256


class Cut(NamedTuple):
    """What kernels have in common: see `TilesConfig`."""

    block_out: int
    stages: int
    warps: int
    splits: int
    tile_rows: int


def default_cut(rows: int, steps: int, size_out: int, gated: bool, multiprocessors: int) -> Cut | None:
    """A sane cut of a matrix; None: expand it.

    Args:
        rows: of activations.
        steps: into which the inputs are cut.
        size_out: rows of the matrix, both halves where `gated`.
        multiprocessors: of the device.
    """
    if rows > _KERNEL_ROWS:
        return None
    matrices = 2 if gated else 1
    # With both halves of a gated matrix the sums of 128 rows need more registers than there are.
    tile_rows = min(64 if gated else 128, max(8, power_of_2(rows)))
    # Up to 16 rows warps multiply by their own instructions, beyond four of them by Hopper's.
    block_out, warps = (64 // matrices, 2) if tile_rows <= 16 else (64, 8 if tile_rows == 128 else 4)
    programs = ceil_div(size_out // matrices, block_out) * ceil_div(rows, tile_rows)
    splits = 1
    enough = 2 * multiprocessors if tile_rows <= 16 else multiprocessors  # sums of many rows are not small
    while splits < 8 and programs * splits < enough and steps >= 4 * splits:
        splits *= 2
    return Cut(block_out, 4 if tile_rows <= 32 else 3 if tile_rows == 64 else 2, warps, splits, tile_rows)


@functools.cache
def tiles_config(
    form: str, rows: int, size_in: int, size_out: int, gated: bool, device: torch.device
) -> TilesConfig | None:
    """How `octavo.kernels.triton.tiles.tiles_linear` cuts a matrix for 16-bit rows; None: it is expanded."""
    there, found = _measured(form, rows, Shape(size_in, size_out, gated), device)
    if there:
        return None if found is None else TilesConfig(*found)
    cut = default_cut(rows, ceil_div(size_in, STEP), size_out, gated, _multiprocessors(device))
    if cut is None:
        return None
    return TilesConfig(cut.block_out, cut.stages, cut.warps, cut.splits, 16, cut.tile_rows)


@functools.cache
def row_config(
    form: str, size_in: int, size_out: int, gated: bool, norm: bool, device: torch.device
) -> RowConfig | WarpsConfig | None:
    """Which of `tiles_row_linear` and `tiles_row_warps_linear` multiplies one row, and how it cuts a matrix;
    None: the norm is not its part."""
    shape = Shape(size_in, size_out, gated)
    there, found = _measured(f"{form} {'norm' if norm else 'row'}", 1, shape, device)
    if there:
        return None if found is None else row_cut(found)
    return default_row_config(size_in, size_out, gated, norm, _multiprocessors(device))


def row_cut(entry: list[Any]) -> RowConfig | WarpsConfig:
    """What a table says of one row."""
    return WarpsConfig(*entry[1]) if _of_warps(entry) else RowConfig(*entry)


def default_row_config(
    size_in: int, size_out: int, gated: bool, norm: bool, multiprocessors: int
) -> RowConfig:
    """A sane cut of a matrix for one row; arguments as of `default_cut`."""
    if not norm:
        cut = default_cut(1, ceil_div(size_in, STEP), size_out, gated, multiprocessors)
        assert cut is not None
        return RowConfig(cut.block_out, cut.stages, cut.warps, cut.splits, 16)
    # A program takes all inputs: where there are few outputs, smaller tiles, and more of each in flight.
    matrices = 2 if gated else 1
    rows = 64  # of the matrix
    while rows > 16 * matrices and ceil_div(size_out, rows) < 2 * multiprocessors:
        rows //= 2
    return RowConfig(rows // matrices, 6 if rows == 16 else 4, 1 if rows == 16 else 2, 1, 16)


@functools.cache
def bytes_config(
    form: str, rows: int, size_in: int, size_out: int, group: int, gated: bool, device: torch.device
) -> SkinnyConfig | None:
    """How `skinny_linear` cuts a matrix of 8 bits for 16-bit rows; None: it is expanded."""
    block_in = min(128, group & -group) if group else 128
    if block_in < 16 or rows > SKINNY_ROWS:
        return None
    there, found = _measured(form, rows, Shape(size_in, size_out, gated), device)
    if there and (found is None or not group or group % found[1] == 0):
        return None if found is None else SkinnyConfig(*found)
    cut = default_cut(rows, ceil_div(size_in, block_in), size_out, gated, _multiprocessors(device))
    if cut is None:
        return None
    return SkinnyConfig(
        cut.block_out, block_in, cut.stages, cut.warps, cut.splits, 32, tile_rows=cut.tile_rows
    )
