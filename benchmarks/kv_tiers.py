"""Time to the first token of prefixes that come back: recomputed, from the device, from host memory.

Usage: python benchmarks/kv_tiers.py [--model benchmarks/shapes/llama-8b] [--json FILE]

So many prompts with prefixes of their own are sent one after the other that their KV is `--times` the
device's cache; then each comes back with another ending, in the same order, so that the device has evicted
it. One request at a time: what is compared is computing a prefix and copying it back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.workloads import random_requests

GIB = 1 << 30


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(Path(__file__).parent / "shapes/llama-8b"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-bytes", type=int, default=16 * GIB)
    parser.add_argument("--swap-space", type=float, default=56.0, help="GiB")
    parser.add_argument("--prefix-len", type=int, default=8192)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--vocab", type=int, default=30000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begin = time.perf_counter()
    llm = LLM(
        args.model, load_format="dummy", skip_tokenizer_init=True, device=args.device,
        kv_cache_memory_bytes=args.kv_bytes, swap_space=args.swap_space,
        max_model_len=args.prefix_len + 512, max_num_seqs=16,
    )  # fmt: skip
    start = time.perf_counter() - begin
    tokens = llm.stats().kv_blocks_total * 16
    count = int(tokens * args.times / args.prefix_len)
    lengths = (args.prefix_len, args.prefix_len)
    prefixes = [i.prompt_token_ids for i in random_requests(count, lengths, (1, 1), vocab=(10, args.vocab))]
    ends = [
        i.prompt_token_ids
        for i in random_requests(2 * count, (33, 33), (1, 1), seed=1, vocab=(10, args.vocab))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)

    def first_token(ids: list[int]) -> tuple[float, int]:
        begin = time.perf_counter()
        output = llm.generate([ids], params, use_tqdm=False)[0]
        return time.perf_counter() - begin, output.num_cached_tokens or 0

    first_token(prefixes[0][::-1])  # compiles
    computed = [first_token(p + e) for p, e in zip(prefixes, ends[:count], strict=True)]
    time.sleep(0.5)
    returned = [first_token(p + e) for p, e in zip(prefixes, ends[count:], strict=True)]
    device = first_token(prefixes[-1] + ends[0])
    stats: Any = llm.stats()
    llm.close()
    hits = [s for s, cached in returned if cached >= args.prefix_len - 16]
    row = {
        "prefixes": count,
        "start s": start,
        "computed s": statistics.median(s for s, _ in computed[1:]),
        "returned s": statistics.median(s for s, _ in returned),
        "returned whole": len(hits),
        "ratio": statistics.median(s for s, _ in returned) / statistics.median(s for s, _ in computed[1:]),
        "from the device s": device[0],
    }
    row |= {
        name: getattr(stats, name)
        for name in type(stats).__struct_fields__
        if "host" in name or "cop" in name
    }
    print("\n".join(f"{k}: {v:.4f}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
