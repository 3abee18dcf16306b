"""Times products of 16-bit rows with weights of 8 and 4 bits in many cuts, and writes the table that ships.

Usage: python benchmarks/weight_only_gpu.py [--forms int4,fp8] [--json times.json] [--write h200.json]

For the matrices of Llama-8B, inside replayed CUDA graphs: every product follows an RMS norm, as in a decoder
layer, and reads other weights than the one before, so that no cache helps; beside them the expanded matrix by
cuBLAS. Kernels are compiled ahead by processes that do not touch the device. What a product should take: the
matrix's bytes at 4.3 TB/s (int4 in groups of 128 has 4.125 bits a weight).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_timing import (
    ROTATION_BYTES,
    SHARED_BYTES,
    Clock,
    add_processes,
    compile_variant,
    compilers,
    device,
    fastest,
    problems,
)

from octavo.kernels.reference_tiles import NF4, Tiles, tiles_shapes
from octavo.kernels.triton import activation, norm, weight_only_choice
from octavo.kernels.triton.expand_bytes import expand_bytes
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.linear_choice import Shape
from octavo.kernels.triton.skinny_linear import SkinnyConfig, skinny_linear
from octavo.kernels.triton.tiles import TilesConfig, expand_tiles, tiles_linear
from octavo.kernels.triton.tiles_row import tiles_row_linear
from octavo.kernels.triton.tiles_row_warps import WarpsConfig, tiles_row_warps_linear

DTYPE = torch.bfloat16
SHAPES = {  # how often a step of Llama-8B multiplies with each matrix
    Shape(4096, 6144, False): 32,
    Shape(4096, 4096, False): 32,
    Shape(4096, 28672, True): 32,
    Shape(14336, 4096, False): 32,
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
FORMS = {
    "int4 row": (1,),
    "int4 norm": (1,),
    "int4": ROWS[1:],
    "fp8": (1, 8, 32, 64),
    "int8": (1, 32),
    "nf4 row": (1,),
    "nf4": (32,),
}
LAUNCHES = 16  # in a graph
GROUP = 128

# Outputs (gated up to 16 rows: half as many columns), stages, warps; by rows of a tile. The first are tried
# first.
TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
    8: ((64, 4, 2), (32, 4, 1), (32, 4, 2), (64, 3, 2), (128, 3, 4), (32, 6, 1)),
    16: ((64, 4, 2), (32, 4, 1), (128, 3, 4), (64, 4, 4)),
    32: ((64, 4, 4), (128, 3, 4), (64, 3, 2), (128, 3, 8)),
    64: ((64, 3, 4), (128, 3, 8), (64, 4, 4)),
    128: ((64, 3, 4), (128, 2, 8), (64, 2, 4), (64, 3, 8)),
}
# For one row, by kernels of its own.
ROW_TILES = (
    (64, 4, 2), (64, 6, 2), (32, 6, 1), (16, 6, 1), (32, 6, 2), (32, 4, 1), (128, 3, 4),
)  # fmt: skip
ROW_WARPS = (
    WarpsConfig(16, 16), WarpsConfig(32, 8, 3, 64), WarpsConfig(16, 8, 3, 32), WarpsConfig(32, 16),
    WarpsConfig(16, 8, 5, 64), WarpsConfig(16, 8, 3, 64),
)  # fmt: skip
PREFETCHES = (0, 4, 16)  # blocks, of the first tiles; of the others the second number
PREFETCH = PREFETCHES[1]


class Job(NamedTuple):
    """A product: `cut` of the form's kernel; None: expanded."""

    form: str
    rows: int
    shape: Shape
    cut: tuple[Any, ...] | None


def tile_rows(rows: int) -> int:
    return min(128, max(8, power_of_2(rows)))


def cuts(form: str, rows: int, shape: Shape, multiprocessors: int) -> Iterator[tuple[Any, ...]]:
    """Tiles with as many splits as leave between half a program and six programs a multiprocessor."""
    tile = tile_rows(rows)
    matrices = 2 if shape.gated else 1
    base, _, way = form.partition(" ")
    if way:
        if way == "row" and not shape.gated:
            yield from (("warps", tuple(cut)) for cut in ROW_WARPS if cut.serves(shape.size_in))
        for outputs, stages, warps in ROW_TILES if base == "int4" else ROW_TILES[:4]:
            block_out = max(16, outputs // matrices)
            for splits in (1, 2, 4, 8):
                programs = ceil_div(shape.size_out // matrices, block_out) * splits
                if splits > 1 and (way == "norm" or programs > 6 * multiprocessors):
                    continue
                if 2 * programs >= multiprocessors and shape.size_in >= splits * 512:
                    first = (outputs, stages, warps) in ROW_TILES[:3]
                    for prefetch in PREFETCHES if first else (PREFETCH,):
                        yield (block_out, stages, warps, splits, prefetch)
        return
    step = 256 if form in ("int4", "nf4") else 128
    some = [(tile, *sides) for sides in (TILES[tile] if form == "int4" else TILES[tile][:3])]
    if rows > 64:
        some += [(64, *sides) for sides in TILES[64][:2]]
    for tile, outputs, stages, warps in some:
        block_out = outputs if tile > 32 or not shape.gated else max(16, outputs // 2)
        if shape.gated and tile > 32 and outputs > 64:
            continue
        size = 1 if form in ("int8", "fp8") else 0.5
        if stages * step * (block_out * matrices * size + tile * 2) > SHARED_BYTES:
            continue
        for splits in (1, 2, 4, 8):
            programs = ceil_div(shape.size_out // matrices, block_out) * splits * ceil_div(rows, tile)
            many = splits > 1 and programs > 6 * multiprocessors
            if 2 * programs < multiprocessors or many or shape.size_in < splits * 512:
                continue
            if step == 256:
                for prefetch in PREFETCHES[1:] if (outputs, stages, warps) == some[0][1:] else (PREFETCH,):
                    yield (block_out, stages, warps, splits, prefetch, tile)
            else:
                yield (block_out, step, stages, warps, splits, 32, True, tile)


def matrix_bytes(form: str, shape: Shape) -> float:
    weights, form = shape.size_in * shape.size_out, form.split()[0]
    return weights * {"int4": 0.5 + 2 / GROUP, "nf4": 0.5 + 4 / 64, "int8": 1, "fp8": 1}[form]


class Weights:
    """Memory of random content, of which matrices are cut."""

    def __init__(self, nbytes: int, device: str):
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device == "cuda":
            self.memory.random_(0, 64)  # of int8 small ones, of FP8 none that is not finite
        self.scales = torch.full((1 << 22,), 0.02, device=device)
        self.words = torch.full((1 << 22,), 0x3C003C00, dtype=torch.int32, device=device)
        self.table = torch.tensor(NF4, device=device)

    def matrix(self, form: str, shape: Shape, place: int) -> Any:
        rows, columns, form = shape.size_out, shape.size_in, form.split()[0]
        if form in ("int8", "fp8"):
            kind = torch.int8 if form == "int8" else torch.float8_e4m3fn
            return self._cut(place, kind, (rows, columns)), self.scales[:rows]
        nf4 = form == "nf4"
        groups = columns // (64 if nf4 else GROUP)
        group, codes, scales, _ = tiles_shapes(rows, columns, groups, 4 if nf4 else 2)
        kept = (self.scales if nf4 else self.words)[: scales[0] * scales[1]].view(scales)
        kind = torch.float32 if nf4 else torch.bfloat16
        table = self.table if nf4 else None
        return Tiles(
            self._cut(place, torch.int16, codes), kept, None, group, kind, table, NF4 if nf4 else None
        )

    def _cut(self, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[place * size : (place + 1) * size].view(dtype).view(shape)

    def places(self, form: str, shape: Shape) -> int:
        size = int(shape.size_in * shape.size_out * (1 if form in ("int8", "fp8") else 0.5))
        return min(self.memory.numel() // size, max(2, ceil_div(ROTATION_BYTES, size)))


def product(job: Job, x: torch.Tensor, matrix: Any, factor: torch.Tensor | None = None) -> torch.Tensor:
    gated = job.shape.gated
    act = "silu" if gated else None
    if job.cut is None:
        out = torch.nn.functional.linear(x, expanded(job, matrix))
        return activation.silu_and_mul(out) if gated else out
    if job.form.endswith(("row", "norm")):
        norm_weight = None if factor is None else factor[: job.shape.size_in]
        stream = None if factor is None else x
        cut = weight_only_choice.row_cut(list(job.cut))
        if isinstance(cut, WarpsConfig):
            return tiles_row_warps_linear(x, matrix, None, cut)
        return tiles_row_linear(x, matrix, None, act, cut, norm_weight, 1e-5, stream)[0]
    if job.form in ("int4", "nf4"):
        return tiles_linear(x, matrix, None, act, TilesConfig(*job.cut))
    return skinny_linear(x, matrix[0], None, act, SkinnyConfig(*job.cut), matrix[1])


def expanded(job: Job, matrix: Any) -> torch.Tensor:
    if job.form.startswith(("int4", "nf4")):
        return expand_tiles(matrix, job.shape.size_in, DTYPE)
    return expand_bytes(*matrix, DTYPE)


# ---- compilation ----


def compile_job(work: tuple[int, Job]) -> str | None:
    """Compiles one variant; returns what went wrong."""
    capability, job = work

    def launch() -> None:
        if not _KEPT:
            _KEPT.append(Weights(1 << 28, "cpu"))  # memory that is not touched
        matrix = _KEPT[0].matrix(job.form, job.shape, 0)
        if job.cut is None:  # without cuBLAS, which would run
            expanded(job, matrix)
            activation.silu_and_mul(torch.empty(1, job.shape.size_out, dtype=DTYPE))
            return
        x = torch.empty(job.rows, job.shape.size_in, dtype=DTYPE)
        factor = torch.empty(job.shape.size_in, dtype=DTYPE) if job.form.endswith("norm") else None
        product(job, x, matrix, factor)

    return compile_variant(capability, job, launch)


_KEPT: list[Weights] = []


# ---- measurement ----


class Bench:
    """Products of rows on the device with weights in rotation."""

    def __init__(self, weights: Weights):
        self.weights = weights
        widest = max(shape.size_in for shape in SHAPES)
        self.rows = torch.randn(max(ROWS), widest, device="cuda").to(DTYPE)
        self.norm = torch.ones(widest, dtype=DTYPE, device="cuda")
        self.clock = Clock()

    def seconds(self, job: Job, alone: bool = False, replays: int = 4) -> float:
        """Of one norm and product (or of the norm alone), the least of some replays. A norm that is part of
        the product comes with a residual addition."""
        matrices = [
            self.weights.matrix(job.form, job.shape, i)
            for i in range(self.weights.places(job.form, job.shape))
        ]
        x, factor = self.rows[: job.rows, : job.shape.size_in], self.norm[: job.shape.size_in]

        def call(place: int) -> None:
            if job.form.endswith("norm"):
                product(job, x, matrices[place], self.norm)
                return
            normed = norm.rms_norm(x, factor, 1e-5)
            if not alone:
                product(job, normed, matrices[place])

        return self.clock.seconds(call, len(matrices), LAUNCHES, replays)

    def right(self, job: Job) -> bool:
        """Whether a cut's result is that of the expanded matrix, up to rounding."""
        matrix = self.weights.matrix(job.form, job.shape, 0)
        x = self.rows[: job.rows, : job.shape.size_in]
        with torch.cuda.stream(self.clock.stream):
            if job.form.endswith("norm"):
                got = product(job, x, matrix, self.norm).float()
                x = norm.rms_norm(x + x, self.norm[: job.shape.size_in], 1e-5)
            else:
                got = product(job, x, matrix).float()
            want = product(job._replace(cut=None), x, matrix).float()
            return bool((got - want).norm() < 1e-2 * want.norm())


def jobs_of(form: str, rows: int, multiprocessors: int) -> dict[Shape, list[Job]]:
    return {
        shape: [
            Job(form, rows, shape, cut) for cut in cuts(form, rows, shape, multiprocessors)
        ] + [Job(form, rows, shape, None)] * (rows >= 32)
        for shape in SHAPES
        if not form.endswith("norm") or shape.size_out > shape.size_in  # what follows a norm
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rows", default="", help="only these numbers")
    parser.add_argument("--json", metavar="FILE", help="write all times there")
    parser.add_argument("--write", metavar="FILE", help="write the table there")
    parser.add_argument("--serves", default="h200,gh200,h100,h800", help="words of chips' names it is for")
    parser.add_argument("--seconds", type=float, default=38.0, help="end by then, with what is found")
    add_processes(parser)
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    pool = compilers(args.processes)
    properties, capability = device()
    multiprocessors = properties.multi_processor_count
    asked = [int(n) for n in args.rows.split(",") if n]
    cells = [(form, n) for form in args.forms.split(",") for n in FORMS[form] if not asked or n in asked]
    # What matters most comes first: whatever the time.
    cells.sort(
        key=lambda cell: ((1, 32, 8, 64, 256, 512, 128, 16).index(cell[1]), list(FORMS).index(cell[0]))
    )
    compiling, seen = {}, set()
    for form, rows in cells:
        work = []
        for shape, jobs in jobs_of(form, rows, multiprocessors).items():
            for job in jobs:
                key = (form, shape.gated, job.cut)  # variants do not depend on sizes
                if key not in seen:
                    seen.add(key)
                    work.append((capability, job))
        compiling[form, rows] = pool.map_async(compile_job, work, chunksize=1)
    bench = Bench(Weights(640 << 20, "cuda"))
    table: weight_only_choice.Table = {}
    times: list[dict[str, Any]] = []
    # While the others compile.
    norms = {
        (shape.size_in, rows): bench.seconds(Job("int4", rows, shape, None), alone=True)
        for shape in SHAPES
        for rows in dict.fromkeys(rows for _, rows in cells)
    }
    steps: dict[tuple[str, int], float] = {}
    best: dict[tuple[str, Shape, int], float] = {}
    for form, rows in cells:
        left = deadline - time.perf_counter()
        if left <= 0:
            print(f"{form} x {rows}: no time left", flush=True)
            continue
        wrong = problems(compiling[form, rows], left)
        if wrong is None:
            print(f"{form} x {rows}: not compiled in time", flush=True)
            continue
        for problem in wrong:
            print(f"    {problem}", flush=True)
        for shape, jobs in jobs_of(form, rows, multiprocessors).items():
            alone, fused = norms[shape.size_in, rows], form.endswith("norm")
            less = 0 if fused else alone
            found = [(seconds - less, job.cut) for seconds, job in fastest(jobs, bench.seconds)]
            seconds, cut = found[0]
            right = cut is None or bench.right(Job(form, rows, shape, cut))
            steps[form, rows] = steps.get((form, rows), 0) + SHAPES[shape] * seconds
            others = " ".join(f"{s * 1e6:.1f}:{','.join(map(str, c or ('expand',)))}" for s, c in found[1:4])
            size, work = matrix_bytes(form, shape), 2 * rows * shape.size_in * shape.size_out
            print(
                f"{form} {rows:3} x {shape.size_in}->{shape.size_out}{' gated' if shape.gated else ''}: "
                f"{seconds * 1e6:.2f} us, {size / max(seconds, 1e-9) / 1e12:.2f} TB/s, "
                f"{work / max(seconds, 1e-9) / 1e12:.1f} TFLOP/s, by {cut}; norm {alone * 1e6:.2f}; "
                f"then {others}{'' if right else ' WRONG RESULT'}",
                flush=True,
            )
            times += [
                {"form": form, "rows": rows, "in": shape.size_in, "out": shape.size_out, "gated": shape.gated,
                 "cut": cut, "us": round(s * 1e6, 3)}
                for s, cut in found
            ]  # fmt: skip
            best[form, shape, rows] = seconds
            if fused and seconds > alone + best.get((form.replace("norm", "row"), shape, rows), 1.0):
                cut = None  # the norm is better off alone
            if right:
                table.setdefault((form, shape), {})[rows] = None if cut is None else list(cut)
                if (
                    cut is not None and cut[0] == "warps"
                ):  # of this shape alone: what is near to it has another
                    other = next(c for _, c in found if c is not None and c[0] != "warps")
                    table[form, shape][rows + 1] = list(other)
    pool.terminate()
    for (form, rows), seconds in steps.items():
        print(f"{form}, {rows} rows: {seconds * 1e3:.3f} ms for the matrices of 32 layers", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"chip": properties.name, "times": times}))
    if args.write:
        serves = args.serves.split(",")
        Path(args.write).write_text(weight_only_choice.table_to_json(table, properties.name, serves))


if __name__ == "__main__":
    main()
