"""Decode steps of a family's own code against the same model through Transformers' code, on a GPU.

    python benchmarks/fallback.py [--shape llama-8b|qwen3-0.6b …] [--repeats N] [--json FILE]

Random weights, CUDA graphs, greedy. Prints milliseconds per step at 1 and 32 requests of either
implementation, of a prefill of 2048 tokens, and their ratios.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gpu import run_command

from octavo.bench.engines import Engines

SHAPES = Path(__file__).parent / "shapes"
ROWS = {
    "decode, 1 request, ms": ("median_decode_step_ms", "--input-len 128 --output-len 256 --batch-size 1"),
    "decode, 32 requests, ms": ("median_decode_step_ms", "--input-len 128 --output-len 256 --batch-size 32"),
    "prefill of 2048, ms": ("median_latency_ms", "--input-len 2048 --output-len 1 --batch-size 1"),
}


def measure(shape: str, implementation: str, repeats: int) -> dict[str, float]:
    """Milliseconds of each row."""
    figures = {}
    engines = Engines()
    for name, (value, work) in ROWS.items():
        report = run_command(
            f"octavo bench latency {SHAPES / shape} --model-impl {implementation} --load-format dummy "
            "--skip-tokenizer-init --max-model-len 4096 --max-num-seqs 64 --no-enable-prefix-caching "
            f"--num-iters {repeats} --num-iters-warmup 1 {work}",
            engines,
        )
        figures[name] = float(report.summary[value])
    engines.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = sorted(path.name for path in SHAPES.iterdir())
    parser.add_argument("--shape", nargs="+", choices=shapes, default=shapes)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    results = {}
    for shape in args.shape:
        own, theirs = (measure(shape, name, args.repeats) for name in ("octavo", "transformers"))
        results[shape] = {"octavo": own, "transformers": theirs}
        for name in own:
            print(
                f"{shape:12} {name:26} octavo {own[name]:9.3f}   transformers {theirs[name]:9.3f}   "
                f"ratio {theirs[name] / own[name]:.2f}"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
