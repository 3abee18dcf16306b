"""Decode steps of a family's own code against the same model through Transformers' code, on a GPU.

    python benchmarks/fallback.py [--shape llama-8b|qwen3-0.6b …] [--repeats N] [--json FILE]

Random weights, CUDA graphs, greedy. Prints milliseconds per step at 1 and 32 requests of either
implementation and their ratio, and the time of loading.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from gpu import SHAPES, decode_ms, run

from octavo import LLM
from octavo.bench.workloads import random_requests

REQUESTS = (1, 32)


def measure(shape: str, implementation: str, repeats: int) -> dict[str, float]:
    """Seconds of loading, and milliseconds per decode step by number of requests."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        begin = time.perf_counter()
        llm = LLM(
            folder, model_impl=implementation, load_format="dummy", skip_tokenizer_init=True,
            max_model_len=4096, max_num_seqs=64, enable_prefix_caching=False,
        )  # fmt: skip
        figures["loading, s"] = time.perf_counter() - begin
        print(implementation, json.dumps(llm.facts.summary))
        for count in REQUESTS:
            run(llm, random_requests(count, (100, 300), (20, 40), seed=9))  # records the graphs
            figures[f"decode, {count} requests, ms"] = decode_ms(llm, count, repeats)
        figures["prefill of 2048, ms"] = 1e3 * min(
            run(llm, random_requests(1, (2048, 2048), (1, 1), seed=seed))[0] for seed in range(repeats)
        )
        llm.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
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
