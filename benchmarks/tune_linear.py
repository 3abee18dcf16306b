"""Finds the fastest product of few rows with each matrix of two models, and writes the table that ships.

Usage: python benchmarks/tune_linear.py [--quick] [--ranks 2] [--write octavo/kernels/triton/tuned/h200.json]

Times the few-row kernel and the tensor-core kernel in many cuts, and cuBLAS (for a gated matrix with the
activation's kernel behind it), inside replayed CUDA graphs: every product follows an RMS norm, as in a
decoder layer, and reads other weights than the one before, so that no cache helps. Kernels are compiled
ahead by processes that do not touch the device. Cuts that do not fit the device are left out. With `--ranks`
the matrices are the parts of the first model's that each of so many tensor-parallel ranks has; what the file
holds of other shapes stays.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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

from octavo.kernels.triton import activation, linear, norm, skinny_linear
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.linear_choice import Choice, Shape, Table, table_from_json, table_to_json
from octavo.kernels.triton.skinny_linear import SkinnyConfig

DTYPE = torch.bfloat16
MODELS = {  # how often a step multiplies with each matrix
    "Llama-8B": {
        Shape(4096, 6144, False): 32,
        Shape(4096, 4096, False): 32,
        Shape(4096, 28672, True): 32,
        Shape(14336, 4096, False): 32,
        Shape(4096, 128256, False): 1,
    },
    "Qwen3-0.6B": {
        Shape(1024, 4096, False): 28,
        Shape(2048, 1024, False): 28,
        Shape(1024, 6144, True): 28,
        Shape(3072, 1024, False): 28,
        Shape(1024, 151936, False): 1,
    },
}
INPUTS_SPLIT = {Shape(4096, 4096, False), Shape(14336, 4096, False)}  # among ranks; the others by outputs
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
QUICK_ROWS = (1, 32)
PREFETCH = 32  # KiB with which cuts are compared; the best are then tried with others
OTHER_PREFETCH = (0, 16, 64, 128)

# Outputs (gated: half as many columns), inputs, stages, warps, weights first; by rows of a tile.
TILES: dict[int, tuple[tuple[int, int, int, int, bool], ...]] = {
    16: (
        (16, 256, 6, 4, True),
        (16, 512, 4, 4, True),
        (32, 128, 6, 4, True),
        (32, 256, 4, 4, True),
        (32, 256, 6, 4, True),
        (64, 128, 4, 4, True),
        (64, 128, 6, 4, True),
        (64, 256, 3, 4, True),
        (128, 64, 6, 4, True),
        (128, 128, 4, 8, True),
        (64, 128, 5, 4, False),
        (16, 256, 6, 2, True),
        (32, 256, 6, 8, True),
        (32, 512, 3, 4, True),
        (64, 256, 4, 8, True),
        (32, 256, 4, 4, False),
    ),
    32: (
        (16, 256, 6, 4, True),
        (16, 512, 3, 4, True),
        (32, 128, 8, 4, True),
        (32, 256, 6, 4, True),
        (32, 256, 4, 8, True),
        (32, 512, 3, 4, True),
        (64, 128, 6, 8, True),
        (64, 256, 3, 4, True),
        (16, 256, 4, 4, False),
        (32, 128, 6, 4, False),
        (32, 256, 4, 4, False),
        (32, 128, 6, 4, True),
        (32, 256, 4, 4, True),
        (64, 64, 6, 4, True),
        (64, 128, 4, 4, True),
        (64, 128, 5, 4, True),
        (64, 256, 4, 8, True),
        (128, 64, 5, 4, True),
        (128, 128, 3, 8, True),
        (128, 128, 4, 8, True),
        (64, 128, 4, 4, False),
    ),
    64: (
        (16, 256, 4, 4, True),
        (32, 128, 6, 4, True),
        (32, 256, 4, 4, True),
        (64, 128, 5, 8, True),
        (16, 256, 4, 4, False),
        (32, 128, 5, 4, False),
        (32, 256, 4, 4, False),
        (64, 128, 5, 4, False),
        (64, 256, 3, 4, False),
        (64, 64, 6, 4, True),
        (64, 128, 3, 4, True),
        (64, 128, 4, 4, True),
        (128, 64, 4, 8, True),
        (128, 64, 6, 8, True),
        (128, 128, 3, 8, True),
        (64, 128, 4, 4, False),
        (128, 64, 5, 4, False),
    ),
    128: (
        (32, 128, 4, 4, False),
        (32, 128, 4, 8, False),
        (64, 128, 3, 8, False),
        (64, 128, 4, 8, True),
        (64, 64, 4, 4, True),
        (64, 64, 6, 4, True),
        (128, 64, 4, 8, True),
        (128, 64, 6, 8, True),
        (128, 128, 3, 8, True),
        (64, 64, 6, 8, False),
        (128, 64, 6, 8, False),
    ),
}


class Found(NamedTuple):
    seconds: float
    choice: Choice


def tile_rows(rows: int) -> int:
    return max(16, power_of_2(rows))


def tiles(rows: int) -> Iterator[tuple[int, tuple[int, int, int, int, bool]]]:
    """Rows of a tile, and its other sides: of all rows, or of the 64 that Hopper multiplies at once."""
    if tile_rows(rows) in TILES:
        yield from ((tile_rows(rows), tile) for tile in TILES[tile_rows(rows)])
    if rows != 64:
        yield from ((64, tile) for tile in TILES[64] if rows > 64 or not tile[4])


def skinny_cuts(rows: int, shape: Shape, multiprocessors: int) -> Iterator[SkinnyConfig]:
    """Tiles with as many splits as leave between half a program and four programs a multiprocessor."""
    matrices = 2 if shape.gated else 1
    columns = shape.size_out // matrices
    for block_rows, (outputs, inputs, stages, warps, weights_first) in tiles(rows):
        block_out = max(16, outputs // matrices)
        if stages * (block_out * matrices + block_rows) * inputs * 2 > SHARED_BYTES:
            continue
        for splits in (1, 2, 4, 8):
            programs = ceil_div(columns, block_out) * splits * ceil_div(rows, block_rows)
            few = 2 * programs < multiprocessors
            many = splits > 1 and programs > 4 * multiprocessors
            if few or many or shape.size_in < splits * 256:
                continue
            yield SkinnyConfig(block_out, inputs, stages, warps, splits, PREFETCH, weights_first, block_rows)


def few_rows_cuts(shape: Shape) -> list[tuple[int, ...]]:
    """As in `FewRowsConfig`, without trailing defaults: in steps, of which one or several are held, and with
    the rows kept in registers. What is to be had by sending for weights while attention runs does not show
    here, where a norm comes before."""
    width = power_of_2(shape.size_in)
    step = min(1024, width)
    half = min(512, step)
    cuts: list[tuple[int, ...]] = [(2, step, 4), (4, step, 4), (8, half, 4), (4, min(2048, width), 8)]
    if width > 1024:
        cuts += [(4, step, 4, 1, 2), (8, step, 4, 1, 2), (8, half, 2, 1, 4), (8, step, 4, 1, 1, 3)]
    if width <= 4096:
        warps = max(1, min(8, width // 512))
        cuts += [(2, width, warps), (4, width, warps), (4, width, warps, 2)]
    return list(dict.fromkeys(cut if len(cut) > 3 else (*cut, 1) for cut in cuts))


def product(choice: Choice, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    act = "silu" if gated else None
    if choice.kind == "few_rows":
        return linear.few_rows_linear(x, weight, None, choice.config, act)
    if choice.kind == "skinny":
        return skinny_linear.skinny_linear(x, weight, None, act, SkinnyConfig(*choice.config))
    out = F.linear(x, weight)
    return activation.silu_and_mul(out) if gated else out


# ---- compilation ----


class Job(NamedTuple):
    capability: int
    choice: Choice
    rows: int
    shape: Shape


def compile_job(job: Job) -> str | None:
    """Compiles one variant; returns what went wrong."""
    x = torch.empty(job.rows, job.shape.size_in, dtype=DTYPE)  # memory that is not touched
    weight = torch.empty(job.shape.size_out, job.shape.size_in, dtype=DTYPE)
    return compile_variant(
        job.capability, job.choice, lambda: product(job.choice, x, weight, job.shape.gated)
    )


def jobs_for(rows: tuple[int, ...], shapes: list[Shape], multiprocessors: int, capability: int) -> list[Job]:
    """A job for each variant; the tensor-core kernel's do not depend on sizes."""
    found: dict[Any, Job] = {}
    for shape in shapes:
        for count in dict.fromkeys(tile_rows(n) for n in rows):
            for cut in skinny_cuts(count, shape, multiprocessors):
                key = (count, shape.gated, cut)
                found.setdefault(key, Job(capability, Choice("skinny", cut), count, shape))
        for count in rows:
            if count <= linear.MAX_ROWS:
                for few in few_rows_cuts(shape):
                    key = (count, shape, few)
                    found[key] = Job(capability, Choice("few_rows", few), count, shape)
    return list(found.values())


# ---- measurement ----


class Bench:
    """Weights in rotation and rows, on the device."""

    def __init__(self, shapes: list[Shape]):
        largest = max(s.size_in * s.size_out for s in shapes)
        self.weights = torch.empty(max(2 * largest, ROTATION_BYTES // 2), dtype=DTYPE, device="cuda")
        self.weights.normal_(std=0.02)
        widest = max(s.size_in for s in shapes)
        self.rows = torch.randn(max(ROWS), widest, device="cuda").to(DTYPE)
        self.norm = torch.ones(widest, dtype=DTYPE, device="cuda")
        self.clock = Clock()

    def seconds(self, choice: Choice | None, rows: int, shape: Shape, replays: int = 3) -> float:
        """Of one norm and product (None: of the norm alone), the least of some replays."""
        size = shape.size_in * shape.size_out
        places = min(self.weights.numel() // size, max(8, ceil_div(ROTATION_BYTES, 2 * size)))
        matrices = [
            self.weights[i * size : (i + 1) * size].view(shape.size_out, shape.size_in) for i in range(places)
        ]
        x, factor = self.rows[:rows, : shape.size_in], self.norm[: shape.size_in]

        def call(place: int) -> None:
            normed = norm.rms_norm(x, factor, 1e-5)
            if choice is not None:
                product(choice, normed, matrices[place], shape.gated)

        count = places * ceil_div(24 if size < 1 << 27 else 8, places)
        return self.clock.seconds(call, places, count, replays)

    def check(self, choice: Choice, rows: int, shape: Shape) -> bool:
        """Whether a kernel's result is cuBLAS's, up to rounding."""
        weight = self.weights[: shape.size_in * shape.size_out].view(shape.size_out, shape.size_in)
        x = self.rows[:rows, : shape.size_in]
        with torch.cuda.stream(self.clock.stream):
            got, want = (product(c, x, weight, shape.gated).float() for c in (choice, Choice("cublas")))
            return bool((got - want).norm() < 1e-2 * want.norm())


class Tuner:
    """Goes through the cells (shape, rows) until the time is over."""

    def __init__(self, bench: Bench, multiprocessors: int, deadline: float):
        self.bench = bench
        self.multiprocessors = multiprocessors
        self.deadline = deadline
        self.results: dict[Shape, dict[int, Found]] = {}
        self.cublas: dict[tuple[Shape, int], float] = {}
        self.norms: dict[tuple[int, int], float] = {}

    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def time(self, cuts: list[Choice], rows: int, shape: Shape, replays: int = 3) -> list[Found]:
        """Fastest first; without those that the device cannot run."""
        found = fastest(
            cuts,
            lambda choice: self.bench.seconds(choice, rows, shape, replays),
            f"{rows} x {shape}: ",
            self.late,
        )
        return [Found(*one) for one in found]

    def baseline(self, rows: int, shape: Shape) -> None:
        self.cublas[shape, rows] = self.bench.seconds(Choice("cublas"), rows, shape)
        if (shape.size_in, rows) not in self.norms:
            self.norms[shape.size_in, rows] = self.bench.seconds(None, rows, shape)

    def tune_group(self, shape: Shape, group: list[int]) -> None:
        """Numbers of rows that share a tile: all cuts with the most of them, the best with the others."""
        most = max(group)
        cuts = [Choice("skinny", cut) for cut in skinny_cuts(most, shape, self.multiprocessors)]
        tried = self.time(cuts, most, shape)
        others = [
            Choice("skinny", found.choice.config._replace(prefetch=kib))
            for found in tried[:2]
            for kib in OTHER_PREFETCH
        ]
        tried = sorted([*tried, *self.time(others, most, shape)], key=lambda f: f.seconds)
        for rows in sorted(group, reverse=True):
            found = tried if rows == most else self.time([f.choice for f in tried[:6]], rows, shape)
            if rows <= linear.MAX_ROWS:
                few = [Choice("few_rows", cut) for cut in few_rows_cuts(shape)]
                found = sorted([*found, *self.time(few, rows, shape)], key=lambda f: f.seconds)
            if self.late():
                return
            again = [f.choice for f in found[:3]] + [Choice("cublas")]
            self.report(rows, shape, found, self.time(again, rows, shape, 9))

    def report(self, rows: int, shape: Shape, found: list[Found], last: list[Found]) -> None:
        """Keeps and prints the best of a cell."""
        best = last[0]
        self.cublas[shape, rows] = next(f.seconds for f in last if f.choice.kind == "cublas")
        self.results.setdefault(shape, {})[rows] = best
        size, alone = shape.size_in * shape.size_out * 2, self.norms[shape.size_in, rows]
        kinds = {}
        for one in found:
            kinds.setdefault(one.choice.kind, one)
        right = best.choice.kind == "cublas" or self.bench.check(best.choice, rows, shape)
        line = " ".join(
            f"{kind} {f.seconds * 1e6:.2f} {tuple(f.choice.config or ())}" for kind, f in kinds.items()
        )
        cublas = self.cublas[shape, rows]
        print(
            f"{rows:3} x {shape.size_in}->{shape.size_out}{' gated' if shape.gated else ''}: "
            f"{best.choice.kind} {tuple(best.choice.config or ())} {best.seconds * 1e6:.2f} us, "
            f"{size / max(best.seconds - alone, 1e-9) / 1e12:.2f} TB/s; cuBLAS {cublas * 1e6:.2f} us, "
            f"{size / max(cublas - alone, 1e-9) / 1e12:.2f}; norm {alone * 1e6:.2f}; {line}"
            f"{'' if right else ' WRONG RESULT'}",
            flush=True,
        )
        if not right:
            del self.results[shape][rows]

    def table(self) -> Table:
        return {
            shape: {rows: found.choice for rows, found in sorted(cells.items())}
            for shape, cells in self.results.items()
        }

    def summary(self, models: dict[str, dict[Shape, int]], rows: tuple[int, ...]) -> None:
        """A step's products (each with a norm before it), as chosen and by cuBLAS."""
        for model, matrices in models.items():
            for count in rows:
                cells = [(self.results.get(s, {}).get(count), s, n) for s, n in matrices.items()]
                if all(found for found, _, _ in cells):
                    ours = sum(found.seconds * n for found, _, n in cells if found)
                    theirs = sum(self.cublas[s, count] * n for _, s, n in cells)
                    print(f"{model}, {count} rows: {ours * 1e3:.3f} ms a step, cuBLAS {theirs * 1e3:.3f}")


def models_of(ranks: int) -> dict[str, dict[Shape, int]]:
    """The matrices to measure: all, or a rank's parts of the first model's."""
    if ranks == 1:
        return MODELS
    name, matrices = next(iter(MODELS.items()))
    parts = {
        shape._replace(size_in=shape.size_in // ranks)
        if shape in INPUTS_SPLIT
        else shape._replace(size_out=shape.size_out // ranks): count
        for shape, count in matrices.items()
    }
    return {f"{name}, one of {ranks} ranks": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROWS} rows")
    parser.add_argument("--write", metavar="FILE", help="write the table there, beside other shapes' choices")
    parser.add_argument("--ranks", type=int, default=1, help="measure what each of so many ranks has")
    parser.add_argument("--serves", default="h200,gh200,h100,h800", help="words of chips' names it is for")
    parser.add_argument("--seconds", type=float, default=225.0, help="end by then, with what is found")
    add_processes(parser)
    args = parser.parse_args()
    start = time.perf_counter()
    deadline = start + args.seconds
    pool = compilers(args.processes)
    properties, capability = device()
    rows = QUICK_ROWS if args.quick else ROWS
    models = models_of(args.ranks)
    shapes = [shape for matrices in models.values() for shape in matrices]
    groups: dict[int, list[int]] = {}
    for count in rows:
        groups.setdefault(tile_rows(count), []).append(count)
    compiling = {}
    for tile, group in groups.items():
        jobs = jobs_for(group, shapes, properties.multi_processor_count, capability)
        compiling[tile] = pool.map_async(compile_job, jobs, chunksize=1)
    torch.manual_seed(0)
    tuner = Tuner(Bench(shapes), properties.multi_processor_count, deadline)
    for shape in shapes:  # while the kernels compile
        for count in rows:
            tuner.baseline(count, shape)
    print(f"{properties.name}: cuBLAS after {time.perf_counter() - start:.0f} s", flush=True)
    for tile, group in groups.items():
        left = max(1.0, min(deadline - time.perf_counter(), 0.4 * args.seconds))
        wrong = problems(compiling[tile], left)
        if wrong is None:
            print(f"tiles of {tile} rows: not compiled in time", flush=True)
        else:
            print(f"tiles of {tile} rows after {time.perf_counter() - start:.0f} s", *wrong[:3], sep="\n  ")
        for shape in shapes:
            tuner.tune_group(shape, group)
    pool.terminate()
    tuner.summary(models, rows)
    if args.write:
        path, table = Path(args.write), tuner.table()
        if path.exists():
            table = table_from_json(json.loads(path.read_text())) | table
        path.write_text(table_to_json(table, properties.name, args.serves.split(",")))
    print(f"{'ended at the limit, ' if tuner.late() else ''}{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
