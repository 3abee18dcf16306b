"""Which kernel multiplies few rows with a matrix, and how it is cut: looked up, never tuned at run time.

`tuned/` has a table for each kind of chip that was measured (`benchmarks/tune_linear.py` writes them):

    {"chip": "NVIDIA H200", "serves": ["h200", …],
     "shapes": [{"in": 4096, "out": 6144, "gated": false, "rows": {"1": ["few_rows", [2, 1024, 4, 1]],
                 "8": ["skinny", [64, 128, 4, 4, 1, 32, true]], "32": ["cublas", null]}}]}

A table serves chips whose name has one of the words of `serves`. `out` counts the matrix's rows, both halves
where `gated`; a choice holds for as many rows as it says and for fewer, down to the one before it.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from octavo.kernels.triton import linear, skinny_linear
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.skinny_linear import SkinnyConfig

Kind = Literal["few_rows", "skinny", "cublas", "warps"]


class Choice(NamedTuple):
    """A kernel, and its configuration: `few_rows_linear`'s (None: its own default) or `skinny_linear`'s."""

    kind: Kind
    config: SkinnyConfig | tuple[int, ...] | None = None


class Shape(NamedTuple):
    """A matrix: `[size_out, size_in]`; gated: its halves are the gate and what is gated."""

    size_in: int
    size_out: int
    gated: bool


class Chip(NamedTuple):
    """What a default follows from."""

    multiprocessors: int
    shared_memory: int  # bytes that a program can have


Table = dict[Shape, dict[int, Choice]]  # by shape and number of rows

# How far a shape may be from one that was measured, in factors of 2 of its sides together.
_NEAR = 2.0
# Outputs from which cuBLAS is taken where nothing was measured: with tiles enough it is near the bandwidth.
_MANY_OUTPUTS = 16384


def table_to_json(table: Table, chip: str, serves: list[str]) -> str:
    """The file of a table, a line for each shape."""
    lines = []
    for shape, choices in table.items():
        rows = {str(n): [c.kind, c.config and list(c.config)] for n, c in sorted(choices.items())}
        lines.append(json.dumps({"in": shape[0], "out": shape[1], "gated": shape[2], "rows": rows}))
    head = json.dumps({"chip": chip, "serves": serves})[:-1]
    return f'{head}, "shapes": [\n' + ",\n".join(lines) + "\n]}\n"


def table_from_json(data: dict[str, Any]) -> Table:
    """The table of a file that was parsed."""
    return {
        Shape(entry["in"], entry["out"], entry["gated"]): {
            int(rows): _choice(*choice) for rows, choice in entry["rows"].items()
        }
        for entry in data["shapes"]
    }


def _choice(kind: Kind, config: list[Any] | None) -> Choice:
    if config is None:
        return Choice(kind)
    return Choice(kind, SkinnyConfig(*config) if kind == "skinny" else tuple(config))


@functools.cache
def load_table(chip: str, kind: str = "") -> Table:
    """The table that serves a chip of this name; an empty one if there is none. `kind`: of a folder's."""
    words = chip.lower().split()
    for path in sorted((Path(__file__).parent / "tuned" / kind).glob("*.json")):
        data = json.loads(path.read_text())
        if any(word in words for word in data["serves"]):
            return table_from_json(data)
    return {}


def look_up(table: Table, rows: int, shape: Shape) -> Choice | None:
    """The choice for a shape, or else for the nearest one; None if no shape is near or so many rows were not
    measured."""

    def distance(other: Shape) -> float:
        if other.gated != shape.gated:
            return math.inf
        return sum(abs(math.log2(a / b)) for a, b in zip(shape[:2], other[:2], strict=True))

    nearest = min(table, key=distance, default=None)
    if nearest is None or distance(nearest) > _NEAR:
        return None
    choices = table[nearest]
    # How much a program of "warps" holds, and how many programs there are, is its own shape's.
    serving = (n for n, choice in choices.items() if choice.kind != "warps" or nearest == shape)
    bucket = min((n for n in serving if n >= rows), default=None)
    return None if bucket is None else _fitted(choices[bucket], shape)


def _fitted(choice: Choice, shape: Shape) -> Choice:
    """A choice for rows of another length: a step of `few_rows_linear` has no more inputs than the matrix,
    and as many times more outputs, so that a program still has as many weights under way."""
    width = max(8, power_of_2(shape.size_in))
    if choice.kind != "few_rows" or choice.config is None or choice.config[1] <= width:
        return choice
    outputs, inputs, *others = choice.config
    return Choice("few_rows", (outputs * (inputs // width), width, *others))


def default_config(rows: int, shape: Shape, chip: Chip) -> SkinnyConfig:
    """A sane cut of a matrix for `skinny_linear`: enough programs, enough bytes in flight.

    Outputs of a program: as many as leave a program for each multiprocessor, and so many that reading the
    rows costs no more than reading the weights. Where that gives too few programs, they share the inputs.
    """
    matrices = 2 if shape.gated else 1
    columns = shape.size_out // matrices
    block_rows = min(128, max(16, power_of_2(rows)))
    least = max(16, block_rows // matrices)
    block_out = least
    while block_out < 64 and ceil_div(columns, 2 * block_out) >= chip.multiprocessors:
        block_out *= 2
    block_in = 256 if (block_out * matrices + block_rows) <= 64 else 128
    while block_in > max(16, power_of_2(shape.size_in)):
        block_in //= 2
    programs = ceil_div(columns, block_out)
    splits = 1
    while splits < 8 and 3 * programs * splits <= 2 * chip.multiprocessors:
        if shape.size_in < 2 * splits * max(512, 2 * block_in):
            break
        splits *= 2
    while True:
        # Two programs on a multiprocessor, so that one starts while another ends; else one.
        stage = (block_out * matrices + block_rows) * block_in * 2
        for memory in (chip.shared_memory // 2 - 1024, chip.shared_memory):
            if memory >= 3 * stage:
                warps = 8 if block_out * matrices * block_rows >= 128 * 128 else 4
                stages = min(6, memory // stage)
                return SkinnyConfig(block_out, block_in, stages, warps, splits, 32, tile_rows=block_rows)
        block_in //= 2


def default_choice(rows: int, shape: Shape, chip: Chip) -> Choice:
    """What is taken where nothing was measured: a kernel of ours where cuBLAS is usually far from the
    bandwidth, that is for few rows and few outputs, and for gated ones, whose activation it saves."""
    if rows == 1 or (rows == 2 and shape.size_in * shape.size_out <= 4 << 20):
        return Choice("few_rows")
    aligned = shape.size_in % 8 == 0  # else there are no asynchronous copies
    if rows <= 64 and aligned and (shape.gated or shape.size_out < _MANY_OUTPUTS):
        return Choice("skinny", default_config(rows, shape, chip))
    return Choice("cublas")


@functools.cache
def choose(rows: int, size_in: int, size_out: int, gated: bool, device: torch.device) -> Choice:
    """The kernel for `[rows, size_in]` of a 2-byte type times a matrix `[size_out, size_in]`.

    Args:
        gated: the result goes through a gated activation, which both kernels of ours can end with.
        device: a CUDA device; any other counts as one with few multiprocessors (Triton's interpreter).

    Returns:
        "few_rows" (for at most `linear.MAX_ROWS` rows), "skinny" (`skinny_linear.MAX_ROWS`), or "cublas":
        PyTorch's own product.
    """
    if not 1 <= rows <= skinny_linear.MAX_ROWS:
        return Choice("cublas")
    shape = Shape(size_in, size_out, gated)
    if device.type != "cuda":
        return default_choice(rows, shape, Chip(4, 227 << 10))
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:  # before Ampere there are no asynchronous copies to keep the memory busy
        return Choice("cublas")
    found = look_up(load_table(properties.name), rows, shape)
    if found is None or size_in % 8 or (found.kind == "few_rows" and rows > linear.MAX_ROWS):
        chip = Chip(properties.multi_processor_count, properties.shared_memory_per_multiprocessor - 1024)
        return default_choice(rows, shape, chip)
    return found
