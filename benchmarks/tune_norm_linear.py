"""Finds good cuts of the few-row product that takes in the norm before it, for `linear.few_rows_config`.

Usage: python benchmarks/tune_norm_linear.py [--rows 1,2]

Times, inside replayed CUDA graphs, a small kernel (an RMS norm, in place of whatever wrote the rows), then
the addition, norm, product and activation of a decoder layer: as one kernel in many cuts, and as they are
where nothing is fused. Each product reads other weights than the one before. Kernels are compiled ahead by
processes that do not touch the device.
"""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple

import torch
from gpu_timing import ROTATION_BYTES, add_processes, become_compiler, compilers, device
from tune_linear import DTYPE, Bench, product

from octavo.kernels.triton import linear, norm
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.linear_choice import Shape, choose

SHAPES = [  # Llama-8B's and Qwen3-0.6B's
    Shape(4096, 6144, False),
    Shape(4096, 28672, True),
    Shape(1024, 4096, False),
    Shape(1024, 6144, True),
]


class Job(NamedTuple):
    capability: int
    rows: int
    shape: Shape
    cut: linear.FewRowsConfig


def cuts(rows: int, shape: Shape, multiprocessors: int) -> list[linear.FewRowsConfig]:
    """In steps, and with the rows kept, for one tile or for as many as leave 2 to 4 programs on each
    multiprocessor."""
    width = power_of_2(shape.size_in)
    found = []
    for outputs, inputs, warps in itertools.product((2, 4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8, 16)):
        held = rows * outputs * inputs // (32 * warps)  # products of a lane in a step
        if inputs > width or not 16 <= held <= 128:
            continue
        found.append(linear.FewRowsConfig(outputs, inputs, warps))
        if inputs == width and held <= 64:
            tiles = {
                ceil_div(shape.size_out, outputs * multiprocessors * programs) for programs in (2, 3, 4, 6)
            }
            found += [linear.FewRowsConfig(outputs, inputs, warps, n) for n in sorted(tiles) if n > 1]
    return found


def fused(
    x: torch.Tensor, residual: torch.Tensor, factor: torch.Tensor, weight: torch.Tensor, job: Job
) -> torch.Tensor:
    act = "silu" if job.shape.gated else None
    return linear.rms_norm_few_rows_linear(x, residual, factor, 1e-5, weight, None, job.cut, act)[0]


def compile_job(job: Job) -> None:
    """Compiles a variant into Triton's cache."""
    become_compiler(job.capability)
    x = torch.empty(job.rows, job.shape.size_in, dtype=DTYPE)
    fused(x, x, x[0], torch.empty(job.shape.size_out, job.shape.size_in, dtype=DTYPE), job)


class NormBench(Bench):
    """Weights in rotation, rows and their stream, on the device."""

    def after_norm(self, job: Job | None, rows: int, shape: Shape) -> float:
        """Seconds of one small kernel and what follows it (job None: unfused), the least of some replays."""
        size = shape.size_in * shape.size_out
        places = min(self.weights.numel() // size, max(8, ceil_div(ROTATION_BYTES, 2 * size)))
        matrices = [
            self.weights[i * size : (i + 1) * size].view(shape.size_out, shape.size_in) for i in range(places)
        ]
        x, factor = self.rows[:rows, : shape.size_in], self.norm[: shape.size_in]
        residual = x.clone()
        choice = choose(rows, *shape, x.device)

        def call(place: int) -> None:
            y = norm.rms_norm(x, factor, 1e-5)
            if job is None:
                normed, _ = norm.add_rms_norm(y, residual, factor, 1e-5)
                product(choice, normed, matrices[place], shape.gated)
            else:
                fused(y, residual, factor, matrices[place], job)

        return self.clock.seconds(call, places, places * ceil_div(24, places), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1", help="comma-separated, each at most 4")
    add_processes(parser)
    args = parser.parse_args()
    with compilers(args.processes) as pool:
        properties, capability = device()
        jobs = [
            Job(capability, rows, shape, cut)
            for rows in map(int, args.rows.split(","))
            for shape in SHAPES
            for cut in cuts(rows, shape, properties.multi_processor_count)
        ]
        pool.map(compile_job, jobs, chunksize=1)
    torch.manual_seed(0)
    bench = NormBench(SHAPES)
    for (rows, shape), group in itertools.groupby(jobs, lambda job: (job.rows, job.shape)):
        size = shape.size_in * shape.size_out * 2
        default = linear.few_rows_config(rows, shape.size_in, shape.size_out, shape.gated, norm=True)
        tried = sorted((bench.after_norm(job, rows, shape), job.cut) for job in group)
        apart = bench.after_norm(None, rows, shape)
        now = bench.after_norm(Job(capability, rows, shape, default), rows, shape)
        print(
            f"{rows} x {shape.size_in}->{shape.size_out}{' gated' if shape.gated else ''}: apart "
            f"{apart * 1e6:.2f} us, default {now * 1e6:.2f}, floor {size / 4.32e12 * 1e6:.2f}; "
            + " ".join(f"{seconds * 1e6:.2f} {tuple(cut)}" for seconds, cut in tried[:6]),
            flush=True,
        )


if __name__ == "__main__":
    main()
