"""How many requests run at once, and how fast, where the KV cache is what limits: by its type.

Usage: python benchmarks/kv_concurrency.py [--model benchmarks/shapes/llama-2-7b] [--json FILE]

Random weights; every request has the same lengths, and the cache the same bytes. Concurrency is the most
requests that a step had; the ratio of bytes is what a token takes unquantized over what it takes quantized.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.workloads import random_requests


def measure(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """One engine's run over the work, after a short one that warms up."""
    llm = LLM(
        args.model, load_format="dummy", skip_tokenizer_init=True, device=args.device, kv_cache_dtype=dtype,
        kv_cache_memory_bytes=args.kv_bytes, max_model_len=args.input_len + args.output_len,
        max_num_seqs=128, enable_prefix_caching=False,
    )  # fmt: skip
    items = list(
        random_requests(
            args.requests,
            (args.input_len, args.input_len),
            (args.output_len, args.output_len),
            vocab=(10, 30000),
        )
    )
    prompts = [item.prompt_token_ids for item in items]

    def run(count: int, tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts[:count], params, use_tqdm=False)
        return time.perf_counter() - begin

    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05):
            most = max(most, llm.stats().num_running)

    run(64, 32)
    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds = run(args.requests, args.output_len)
    over.set()
    watcher.join()
    stats = llm.stats()
    llm.close()
    return {
        "kv_cache_dtype": dtype,
        "blocks": stats.kv_blocks_total,
        "concurrency": most,
        "output tokens/s": args.requests * args.output_len / seconds,
        "preemptions": stats.num_preemptions,
    }


def main() -> None:
    """Run all types and print them with their ratios to the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(Path(__file__).parent / "shapes/llama-2-7b"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "fp8", "int8"])
    parser.add_argument("--kv-bytes", type=int, default=14 << 30)
    parser.add_argument("--requests", type=int, default=54)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=1792)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        row = measure(args, dtype)
        first = rows[0] if rows else row
        row["bytes ratio"] = row["blocks"] / first["blocks"]
        row["concurrency ratio"] = row["concurrency"] / first["concurrency"]
        row["throughput ratio"] = row["output tokens/s"] / first["output tokens/s"]
        rows.append(row)
        print(
            "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
