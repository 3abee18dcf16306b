"""Products in 8 bits on the GPU: times what is chosen, or finds the fastest cuts and writes tables to ship.

Usage: python benchmarks/lowbit_gpu.py [--kinds fp8,int8] [--rows 1,4]
       [--tune [--write octavo/kernels/triton/tuned]]

Every product follows, as in a decoder layer, what quantizes its rows (one row is quantized in it), inside
replayed CUDA graphs, and reads other weights than the one before. Printed are the time of both, the product's
bytes and operations per second by the difference to the first alone, and the same product in bfloat16 after
its norm. Kernels are compiled ahead by processes that do not touch the device.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from gpu_timing import (
    SHARED_BYTES,
    Clock,
    add_processes,
    compile_variant,
    compilers,
    device,
    fastest,
    problems,
)
from tune_linear import MODELS, Found

from octavo.kernels import ops, reference_lowbit
from octavo.kernels.triton import norm
from octavo.kernels.triton.choice_8bit import Kind8, choose, library_serves
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.linear_choice import Choice, Shape, Table, table_to_json
from octavo.kernels.triton.lowbit_8bit import form_of, multiply
from octavo.kernels.triton.row_8bit import RowConfig, row_8bit
from octavo.kernels.triton.row_8bit_warps import WarpsConfig, row_8bit_warps
from octavo.kernels.triton.rows_8bit import gated_quantize, quantize_rows, rms_norm_quantize
from octavo.kernels.triton.skinny_linear import SkinnyConfig
from octavo.quantization import gpu_linear

BF16 = torch.bfloat16
DEVICE = "cuda"
KINDS: tuple[Kind8, ...] = get_args(Kind8)
SHAPES = {name: {s: n for s, n in shapes.items() if s.size_out < 100_000} for name, shapes in MODELS.items()}
# The last stands for all that are more.
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 2048)
ALL_ROWS = 1 << 20
ONE_ROW = ("few_rows", "warps")  # kernels that quantize the row themselves
REPORTED = (1, 8, 32, 64, 128, 512, 4096)
BUFFER = 384 << 20  # bytes of different weights: several times the L2

# Outputs, inputs, stages, warps, weights first, rows of a tile; by the number of rows that they are for.
TILES: dict[int, tuple[tuple[int, int, int, int, bool, int], ...]] = {
    16: (
        (64, 128, 4, 4, True, 16), (64, 128, 8, 4, True, 16), (64, 256, 3, 4, True, 16),
        (64, 256, 5, 4, True, 16), (64, 512, 3, 4, True, 16), (128, 128, 4, 4, True, 16),
        (128, 256, 3, 8, True, 16),
    ),
    32: (
        (64, 128, 4, 4, True, 32), (64, 128, 7, 4, True, 32), (64, 256, 3, 4, True, 32),
        (64, 256, 4, 4, True, 32), (128, 128, 4, 4, True, 32), (128, 256, 3, 8, True, 32),
    ),
    64: (
        (64, 128, 4, 4, True, 64), (64, 128, 6, 4, True, 64), (64, 256, 3, 4, True, 64),
        (64, 128, 5, 4, False, 64), (128, 128, 4, 8, True, 64), (128, 128, 4, 4, False, 64),
    ),
    128: (
        (64, 128, 4, 4, True, 128), (128, 128, 3, 8, True, 128), (128, 128, 4, 8, False, 128),
        (64, 128, 4, 4, False, 64), (64, 128, 5, 8, False, 128), (128, 128, 3, 4, False, 64),
    ),
    256: (
        (128, 128, 3, 8, False, 128), (128, 128, 4, 8, False, 128), (128, 128, 4, 4, False, 64),
        (256, 128, 3, 8, False, 128), (128, 256, 3, 8, False, 128),
    ),
}  # fmt: skip


WARPS = (WarpsConfig(16, 256, 8), WarpsConfig(16, 512, 8), WarpsConfig(32, 256, 16), WarpsConfig(16, 256, 16))


class Job(NamedTuple):
    """A kernel to be compiled."""

    capability: int
    kind: Kind8
    rows: int
    shape: Shape
    choice: Choice


def cells(rows: tuple[int, ...]) -> Iterator[tuple[Shape, int]]:
    """Shapes and numbers of rows; only one row's product may end with an activation."""
    for shapes in SHAPES.values():
        for shape in shapes:
            for count in rows:
                if shape.gated and count == 1:
                    yield shape, count
                yield shape._replace(gated=False), count


def row_cuts(shape: Shape) -> Iterator[RowConfig]:
    """32 or 64 weights a thread and tile, in one part of the inputs or, without a norm, in several."""
    alone = after_norm(shape) is False
    parts = {1} if shape.size_in <= 4096 else set()
    if alone:
        parts |= {ceil_div(shape.size_in, width) for width in (1024, 2048, 4096) if shape.size_in > width}
    for splits in sorted(parts):
        width = power_of_2(ceil_div(shape.size_in, splits))
        for warps in dict.fromkeys(min(16, max(1, width // size)) for size in (1024, 512, 256)):
            for weights in (32, 64):
                outputs = weights * 32 * warps // width
                for tiles in (1, 2, 3, 4, 6, 8):
                    programs = ceil_div(shape.size_out, max(1, outputs * tiles)) * splits
                    held = weights * tiles <= 256
                    if 2 <= outputs <= 32 and splits <= 8 and held and 132 <= programs <= 132 * 64:
                        yield RowConfig(outputs, warps, tiles, splits)


def after_norm(shape: Shape) -> bool:
    """Whether a model's product of this shape follows a norm: those that come of the hidden size."""
    return shape.size_out > shape.size_in


def cuts(kind: Kind8, shape: Shape, rows: int, processors: int = 132) -> Iterator[Choice]:
    """What may be the fastest."""
    if rows == 1:
        yield from (Choice("few_rows", cut) for cut in row_cuts(shape))
        if shape.gated:
            return
        if kind != "fp8_block":
            yield from (Choice("warps", cut) for cut in WARPS if cut.serves(shape.size_in))
    if library_serves(rows, shape, kind, BF16) and rows >= 16:
        yield Choice("cublas")
    for block_out, block_in, stages, warps, first, tile in TILES[min(256, max(16, power_of_2(rows)))]:
        if stages * (block_out + tile) * block_in > SHARED_BYTES or block_in > shape.size_in:
            continue
        if kind == "fp8_block" and (block_in != 128 or block_out > 128):
            continue
        if kind != "int8" and block_out * tile > 128 * 128:  # two accumulators of FP8 fill the registers
            continue
        for splits in (1, 2, 4, 8):
            programs = ceil_div(shape.size_out, block_out) * ceil_div(rows, tile) * splits
            if splits > 1 and (programs > 4 * processors or shape.size_in < splits * 256):
                continue
            if 2 * programs < processors and splits < 8 and shape.size_in >= 512 * splits:
                continue
            yield Choice("skinny", SkinnyConfig(block_out, block_in, stages, warps, splits, 32, first, tile))


def matrix(kind: Kind8, shape: Shape, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in some bytes, and scales that make products about 1."""
    weight = memory[: shape.size_in * shape.size_out].view(shape.size_out, shape.size_in)
    weight = weight.view(torch.int8 if kind == "int8" else reference_lowbit.FP8)
    sizes: tuple[int, ...] = (shape.size_out,)
    if kind == "fp8_block":
        sizes = (ceil_div(shape.size_out, 128), ceil_div(shape.size_in, 128))
    return weight, torch.full(sizes, shape.size_in**-0.5 / 40, device=memory.device)


class Product:
    """A product of one shape and number of rows as layers call it, over weights in rotation."""

    def __init__(self, kind: Kind8, shape: Shape, rows: int, memory: torch.Tensor):
        self.kind, self.shape, self.rows = kind, shape, rows
        size = shape.size_in * shape.size_out
        places = max(1, min(memory.numel() // size, 24))
        self.matrices = [matrix(kind, shape, memory[i * size :]) for i in range(places)]
        self.x = torch.randn(rows, shape.size_in, device=memory.device).to(BF16)
        self.stream = torch.zeros_like(self.x)
        self.factor = torch.ones(shape.size_in, dtype=BF16, device=memory.device)
        self.gates = None
        if not after_norm(shape) and shape.size_in > 2 * shape.size_out:
            self.gates = torch.randn(rows, 2 * shape.size_in, device=memory.device).to(BF16)

    def quantized(self) -> Any:
        """What makes the rows, alone."""
        form = form_of(*self.matrices[0])
        if self.gates is not None:
            return gated_quantize(self.gates, "silu", form)
        if after_norm(self.shape):
            return rms_norm_quantize(self.x, self.stream, self.factor, 1e-5, form)
        return quantize_rows(self.x, form)

    def run(self, choice: Choice, place: int = 0) -> torch.Tensor:
        """Rows and product."""
        weight, scale = self.matrices[place]
        if choice.kind == "warps":
            cut = WarpsConfig(*(choice.config or ()))
            normed, stream = (self.factor, 1e-5), self.stream
            behind = (normed, stream) if after_norm(self.shape) else (None, None)
            return row_8bit_warps(self.x, weight, scale, None, None, *behind, cut)[0]
        if choice.kind == "few_rows":
            fused: dict[str, Any] = {"act": "silu"} if self.shape.gated else {}
            if after_norm(self.shape):
                fused |= {"norm": (self.factor, 1e-5), "residual": self.stream}
            return row_8bit(self.x, weight, scale, config=choice.config, **fused)[0]
        return multiply(self.quantized(), weight, scale, None, BF16, choice)

    def wrong(self, choice: Choice) -> float:
        """How far it is from the plain twin."""
        weight, scale = self.matrices[0]
        x, alone = self.x, choice.kind in ONE_ROW
        self.stream.zero_()  # to which runs have added
        if self.gates is not None and not alone:
            x = ops.silu_and_mul(self.gates)
        elif after_norm(self.shape):
            x = norm.rms_norm(x, self.factor, 1e-5)
        if self.kind == "fp8_block":
            want = reference_lowbit.fp8_block_linear(x, weight, scale)
        else:
            plain = reference_lowbit.int8_linear if self.kind == "int8" else reference_lowbit.fp8_linear
            want = plain(x, weight, scale)
        if self.shape.gated:
            want = ops.silu_and_mul(want)
        return float((self.run(choice).float() - want.float()).norm() / want.float().norm())


# ---- compilation ----


def compile_job(job: Job) -> str | None:
    """Compiles one variant; returns what went wrong."""
    memory = torch.empty(job.shape.size_in * job.shape.size_out, dtype=torch.int8)  # is not touched

    def launch() -> None:
        Product(job.kind, job.shape, job.rows, memory).run(job.choice)

    return compile_variant(job.capability, job.choice, launch)


def jobs_for(kind: Kind8, chosen: dict[tuple[Shape, int], list[Choice]], capability: int) -> list[Job]:
    """A job for each variant; the tensor-core kernel's do not depend on sizes, its rows' do."""
    found: dict[Any, Job] = {}
    for (shape, rows), choices in chosen.items():
        for choice in choices:
            if choice.kind == "skinny":
                own = {(choice.config, power_of_2(rows)), (shape.size_in, after_norm(shape))}
                if all(key in found for key in own):
                    continue
                for key in own:
                    found[key] = Job(capability, kind, min(rows, 256), shape, choice)
            elif choice.kind in ONE_ROW:
                found[shape, choice] = Job(capability, kind, rows, shape, choice)
    return list(dict.fromkeys(found.values()))


# ---- measurement ----


class Bench:
    """One kind's products on the device."""

    def __init__(self, kind: Kind8, clock: Clock, bandwidth: float = 4.32e12):
        self.kind, self.clock, self.bandwidth = kind, clock, bandwidth
        codes = torch.randn(1 << 24, device=DEVICE) * 40
        eight = codes.clamp(-127, 127).to(torch.int8 if kind == "int8" else reference_lowbit.FP8)
        self.memory = eight.view(torch.int8).repeat(ceil_div(BUFFER, 1 << 24))
        self.table: Table = {}
        self.steps: dict[tuple[Shape, int], float] = {}

    def seconds(self, call: Callable[[int], Any], places: int, replays: int = 3) -> float:
        """Of one call, by a graph of as many of each place as make 20."""
        return self.clock.seconds(call, places, places * ceil_div(20, places), replays)

    def best(self, shape: Shape, rows: int, choices: list[Choice]) -> None:
        """Times a cell's choices, keeps the fastest that is right, and prints it."""
        product = Product(self.kind, shape, rows, self.memory)
        places = len(product.matrices)

        def seconds(choice: Choice, replays: int = 3) -> float:
            return self.seconds(functools.partial(product.run, choice), places, replays)

        found = [Found(*one) for one in fastest(choices, seconds, f"{rows} x {shape}: ")]
        again = [Found(seconds(f.choice, 9), f.choice) for f in found[:3]]
        again.sort(key=lambda f: f.seconds)
        wrong = 0.0
        while again and (wrong := product.wrong(again[0].choice)) > 1e-2:
            print(f"    {rows} x {shape}: {again.pop(0).choice} is wrong by {wrong}", flush=True)
        if not again:
            return
        best = again[0]
        alone = 0.0
        if best.choice.kind not in ONE_ROW:
            alone = self.seconds(lambda _: product.quantized(), 1)
        kept = best.choice
        if kept.kind != "cublas" and kept.config is not None:
            kept = Choice(kept.kind, tuple(kept.config))
        self.table.setdefault(shape, {})[ALL_ROWS if rows == ROWS[-1] else rows] = kept
        self.steps[shape, rows] = best.seconds
        size = shape.size_in * shape.size_out
        own = max(best.seconds - alone, 1e-9)
        library = next((f.seconds for f in found if f.choice.kind == "cublas"), None)
        print(
            f"{self.kind:9} {rows:5} x {shape.size_in}->{shape.size_out}{' gated' if shape.gated else '':6} "
            f"{best.seconds * 1e6:8.2f} us (rows alone {alone * 1e6:6.2f}), {size / own / 1e12:5.2f} TB/s, "
            f"{2 * size * rows / own / 1e12:6.0f} TFLOP/s; floor {size / self.bandwidth * 1e6:6.2f} us; "
            f"wrong {wrong:.1e}; bf16 {self.bf16(shape, rows) * 1e6:8.2f} us"
            + (f"; library {library * 1e6:.2f}" if library is not None else "")
            + f"; {best.choice.kind} {tuple(best.choice.config or ())} of {len(found)}",
            flush=True,
        )

    def bf16(self, shape: Shape, rows: int) -> float:
        """The product of 16 bits with what is before it, as layers call it."""
        size = shape.size_in * shape.size_out
        places = max(1, min(self.memory.numel() // 2 // size, 24))
        memory = self.memory.view(torch.uint8)
        weights = [
            memory[2 * i * size : 2 * (i + 1) * size].view(BF16).view(shape.size_out, shape.size_in)
            for i in range(places)
        ]
        x = torch.randn(rows, shape.size_in, device=DEVICE).to(BF16)
        stream, factor = torch.zeros_like(x), torch.ones(shape.size_in, dtype=BF16, device=DEVICE)
        act = ops.silu_and_mul if shape.gated else None

        def call(place: int) -> Any:
            weight = weights[place]
            if not after_norm(shape):
                return gpu_linear.linear(x, weight, None, act)
            fused = gpu_linear.rms_norm_linear(x, stream, factor, 1e-5, weight, None, act)
            if fused is not None:
                return fused
            return gpu_linear.linear(norm.add_rms_norm(x, stream, factor, 1e-5)[0], weight, None, act)

        return self.seconds(call, places)

    def summary(self, rows: tuple[int, ...]) -> None:
        """What the products of a step take, with what quantizes their rows."""
        for model, shapes in SHAPES.items():
            for count in rows:
                keys = [(s._replace(gated=False), s, n) for s, n in shapes.items()]
                if all((shape, count) in self.steps for shape, _, _ in keys):
                    # One row's gates may be either product's.
                    total = sum(
                        n * min(self.steps[shape, count], self.steps.get((whole, count), float("inf")))
                        for shape, whole, n in keys
                    )
                    floor = sum(s.size_in * s.size_out * n for s, _, n in keys) / self.bandwidth
                    print(
                        f"{self.kind}: {model}, {count} rows: {total * 1e3:.3f} ms, bytes {floor * 1e3:.3f}"
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tune", action="store_true", help="try all cuts, at the tables' numbers of rows")
    parser.add_argument("--rows", help="only these numbers of rows")
    parser.add_argument("--write", metavar="DIR", help="with --tune: write DIR/KIND/NAME.json")
    parser.add_argument("--name", default="h200")
    parser.add_argument("--serves", default="h200,gh200,h100,h800", help="words of chips' names it is for")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin nothing new after that")
    add_processes(parser)
    args = parser.parse_args()
    start = time.perf_counter()
    pool = compilers(args.processes)
    properties, capability = device()
    rows = ROWS if args.tune else REPORTED
    if args.rows:
        rows = tuple(map(int, args.rows.split(",")))
    kinds: list[Kind8] = [kind for kind in KINDS if kind in args.kinds.split(",")]
    chosen: dict[Kind8, dict[tuple[Shape, int], list[Choice]]] = {}
    compiling = {}
    for kind in kinds:
        if args.tune:
            chosen[kind] = {(s, n): list(cuts(kind, s, n)) for s, n in cells(rows)}
        else:
            chosen[kind] = {
                (s, n): [choose(n, s.size_in, s.size_out, s.gated, kind, BF16, torch.device("cuda", 0))]
                for s, n in cells(rows)
            }
        jobs = jobs_for(kind, chosen[kind], capability)
        print(f"{kind}: {len(jobs)} kernels to compile", flush=True)
        compiling[kind] = pool.map_async(compile_job, jobs, chunksize=1)
    torch.manual_seed(0)
    clock = Clock()
    for kind in kinds:
        wrong = problems(compiling[kind], max(1.0, args.seconds - (time.perf_counter() - start)))
        if wrong is None:
            print(f"{kind}: not compiled in time", flush=True)
            break
        print(f"{kind}: compiled after {time.perf_counter() - start:.0f} s", *wrong[:5], sep="\n  ")
        bench = Bench(kind, clock)
        for (shape, count), choices in chosen[kind].items():
            if time.perf_counter() - start < args.seconds:
                bench.best(shape, count, choices)
        bench.summary(rows)
        if args.write and args.tune:
            target = Path(args.write) / kind / f"{args.name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(table_to_json(bench.table, properties.name, args.serves.split(",")))
        del bench
    pool.terminate()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
