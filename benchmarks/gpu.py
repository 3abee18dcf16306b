"""First figures on a GPU: the seeded workloads at two shapes, random weights, token ids in, greedy.

    python benchmarks/gpu.py [--shape llama-8b|qwen3-0.6b] [--rows decode1,decode32,…] [--json FILE]

Prints one line per figure: measured, and the floor computed from bytes over bandwidth or operations
over rate (rates given by --bandwidth and --rate; defaults are one H200's as measured).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.bench.workloads import WorkItem, random_requests, shared_prefix_requests

SHAPES = {
    "llama-8b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
        torch_dtype="bfloat16", hidden_act="silu",
    ),
    "qwen3-0.6b": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True,
        torch_dtype="bfloat16", hidden_act="silu",
    ),
}  # fmt: skip
STREAMED = {"llama-8b": 15.0e9, "qwen3-0.6b": 1.19e9}  # bytes of weights that a step reads
THROUGHPUT = {"llama-8b": 512, "qwen3-0.6b": 256}


def run(llm: LLM, items: list[WorkItem]) -> tuple[float, int]:
    """Seconds and output tokens of a workload, all requests at once."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=i.max_tokens, ignore_eos=True, detokenize=False)
        for i in items
    ]
    begin = time.perf_counter()
    outputs = llm.generate([i.prompt_token_ids for i in items], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    for item, output in zip(items, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == item.max_tokens
    return seconds, sum(i.max_tokens for i in items)


def decode_ms(llm: LLM, count: int, repeats: int) -> float:
    """Milliseconds per decode step: the difference of runs of 256 and 1 output tokens."""
    times = []
    for seed in range(repeats):
        long = run(llm, random_requests(count, (128, 128), (256, 256), seed=100 + seed))[0]
        short = run(llm, random_requests(count, (128, 128), (1, 1), seed=200 + seed))[0]
        times.append((long - short) / 255 * 1e3)
    return statistics.median(times)


def measure(
    shape: str, rows: set[str], repeats: int, bandwidth: float, rate: float
) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        begin = time.perf_counter()
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=12288,
            enable_prefix_caching=False,
            max_num_seqs=512, gpu_memory_utilization=0.9,
        )  # fmt: skip
        run(llm, random_requests(1, (16, 16), (1, 1)))
        figures["start to first token, s"] = {"measured": time.perf_counter() - begin}
        print(json.dumps(llm.facts.summary), file=sys.stderr)
        run(llm, random_requests(64, (100, 300), (20, 40), seed=9))  # warm-up
        floor = STREAMED[shape] / bandwidth * 1e3
        if "decode1" in rows:
            figures["decode, 1 request, ms"] = {"measured": decode_ms(llm, 1, repeats), "floor": floor}
        if "decode32" in rows:
            figures["decode, 32 requests, ms"] = {"measured": decode_ms(llm, 32, repeats), "floor": floor}
        if "prefill" in rows:
            times = [
                run(llm, random_requests(1, (8192, 8192), (1, 1), seed=s))[0] for s in range(repeats + 1)
            ]
            parameters = STREAMED[shape] / 2
            figures["prefill of 8192, s"] = {
                "measured": statistics.median(times[1:]),
                "floor": 2 * parameters * 8192 / rate,
            }
        if "throughput" in rows:
            count = THROUGHPUT[shape]
            seconds, tokens = run(llm, random_requests(count, (100, 1024), (100, 1024)))
            figures[f"{count} requests, output tokens/s"] = {"measured": tokens / seconds}
        if "shared" in rows:
            items = shared_prefix_requests(64, 4096, 64, 16)
            figures["shared prefix, cache off, s"] = {"measured": run(llm, items)[0]}
        llm.close()
        if "shared" in rows:
            llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=12288, max_num_seqs=512
            )
            run(llm, random_requests(8, (100, 300), (4, 4), seed=9))
            run(llm, shared_prefix_requests(8, 512, 64, 4, seed=77))
            figures["shared prefix, cache on, first pass, s"] = {"measured": run(llm, items)[0]}
            llm.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--rows", default="decode1,decode32,prefill,throughput,shared")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=4.32e12, help="bytes/s")
    parser.add_argument("--rate", type=float, default=745e12, help="bf16 operations/s")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    figures = measure(args.shape, set(args.rows.split(",")), args.repeats, args.bandwidth, args.rate)
    for name, values in figures.items():
        floor = f"   floor {values['floor']:.3f}" if "floor" in values else ""
        print(f"{args.shape:12} {name:45} {values['measured']:12.3f}{floor}")
    if args.json:
        Path(args.json).write_text(json.dumps({args.shape: figures}, indent=1))


if __name__ == "__main__":
    main()
