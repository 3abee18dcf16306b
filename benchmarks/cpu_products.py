"""Products with quantized matrices on one core: their rates, the instruction's own, PyTorch's in bfloat16.

    taskset -c 0 python -m benchmarks.cpu_products [--formats q8,q4-minimum] [--seconds 0.25]

One thread, of which its own processor time counts, so that other work on the core costs no more than its
share of the caches; a figure is the best of the repetitions that fit in --seconds. Prints Markdown.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from octavo.kernels.cpu import build, products, quant
from octavo.kernels.reference_quant import INT8, QuantFormat, QuantizedMatrix

FORMATS = {
    "q8": INT8,
    "q4": QuantFormat(4, 32, False, 8),
    "q4-minimum": QuantFormat(4, 32, True, 0),
    "q5": QuantFormat(5, 32, False, 16),
    "q6-group16": QuantFormat(6, 16, False, 32),
}
# Columns, rows, whether a gate follows: SmolLM2-135M's matrices.
SHAPES = ((576, 3072, True), (1536, 576, False), (576, 960, False), (576, 49152, False))
ROWS = (1, 4, 32, 128, 512, 2048)
_MOST = 5e10  # multiplications of a product that is worth measuring


def best(run: Callable[[], object], seconds: float) -> float:
    """Seconds of processor time of the fastest repetition."""
    run()
    least, end = float("inf"), time.thread_time() + seconds
    while time.thread_time() < end:
        begin = time.thread_time()
        run()
        least = min(least, time.thread_time() - begin)
    return least


def instruction_rate(seconds: float) -> float:
    """Operations a second of one core's dot products of bytes; 0 without AVX-512 VNNI."""
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "dot.so")
        source = str(Path(__file__).with_name("cpu_dot.cpp"))
        subprocess.run([build.find_compiler(), *build.FLAGS, "-shared", source, "-o", library], check=True)
        turns = ctypes.CDLL(library).dot_turns
    turns.argtypes, turns.restype = [ctypes.c_int64], ctypes.c_int64
    count = turns(20000)
    return count / best(lambda: turns(20000), seconds) if count else 0.0


def random_matrix(fmt: QuantFormat, rows: int, columns: int) -> QuantizedMatrix:
    low, high = (-127, 128) if fmt.bits == 8 else (0, 1 << fmt.bits)
    q = torch.randint(low, high, (rows, columns), dtype=torch.int8 if fmt.bits == 8 else torch.uint8)
    scale = (torch.rand(rows, columns // fmt.group) * 0.02).half()
    return QuantizedMatrix(fmt, q, scale, -scale if fmt.has_minimum else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="q8,q4-minimum,q6-group16", help=f"of {','.join(FORMATS)}")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each figure; default %(default)s")
    args = parser.parse_args()
    names = args.formats.split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        parser.error(f"--formats {unknown[0]}: of {','.join(FORMATS)}")
    if not quant.lanes():
        parser.error("no kernels for quantized matrices on this CPU")
    torch.set_num_threads(1)
    limit = instruction_rate(args.seconds)
    print(f"The instruction alone: {limit / 1e9:.0f} G operations/s (one core; 0: no AVX-512 VNNI)\n")
    print("| columns → rows | rows of x | " + " | ".join(f"{name}, Gop/s (GB/s)" for name in names), end="")
    print(" | PyTorch bfloat16 |\n|" + "---|" * (len(names) + 3))
    for columns, rows, gated in SHAPES:
        matrices = [quant.PackedMatrix([random_matrix(FORMATS[f], rows, columns)], columns) for f in names]
        plain = torch.randn(rows, columns).bfloat16()
        for n in ROWS:
            if n * rows * columns > _MOST:
                continue
            x, cells = torch.randn(n, columns).bfloat16(), []
            for packed in matrices:
                gate = (products.SILU,) if gated and packed.gates else ()
                took = best(partial(packed.linear, x, None, *gate), args.seconds)
                size = sum(t.nbytes for t in packed.tensors)
                cells.append(f"{2e-9 * n * rows * columns / took:.0f} ({size / took / 1e9:.0f})")
            took = best(partial(torch.nn.functional.linear, x, plain), args.seconds)
            cells.append(f"{2e-9 * n * rows * columns / took:.0f}")
            print(f"| {columns} → {rows} | {n} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
