"""What drafts cost where the KV cache is what limits the requests at once: plain decoding beside a draft
model whose KV lies in the same pool.

Usage: python benchmarks/speculative_memory.py [--fits 2 4 16] [--requests 16] [--rounds 3] [--write]

A Llama of 16 layers and 50 million parameters with random weights, and a draft of 2 such layers; drafts stand
as `--acceptance` says (synthetic), so that what is measured is memory and time, not a model. All requests are
there at once and ask for the same number of tokens; the cache holds `--fits` of them from begin to end. Of
the rounds, in which the engines take turns, the medians count. Rates are per second of this process's CPU
time, which other processes' work disturbs least. `--write` puts the table into benchmarks/speculative.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.workloads import random_requests

PAGE = Path(__file__).with_name("speculative.md")
BEGIN, END = "<!-- memory: begin (benchmarks/speculative_memory.py) -->", "<!-- memory: end -->"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 16 * 2 * 2 * 64 * 2  # of the target's KV


def engine(folder: Path, args: argparse.Namespace, fits: int, drafts: str) -> LLM:
    """An engine whose cache holds `fits` requests; `drafts` is "off", "adaptive" or "always"."""
    settings: dict[str, Any] = {}
    if drafts != "off":
        settings["speculative_config"] = {
            "method": "draft_model",
            "model": str(folder / "draft"),
            "adaptive": drafts == "adaptive",
            "num_speculative_tokens": len(args.acceptance),
            "synthetic_acceptance": args.acceptance,
        }
    length = args.input_len + args.output_len
    cache = fits * -(-length // 16) * 16 * TOKEN_BYTES
    return LLM(
        str(folder / "target"), load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype="bfloat16",
        num_threads=args.threads, max_model_len=length, max_num_seqs=args.requests,
        kv_cache_memory_bytes=cache, enable_prefix_caching=False, **settings,
    )  # fmt: skip


def run(llm: LLM, args: argparse.Namespace, number: int) -> dict[str, float]:
    """One round: tokens per second of CPU time, and what happened meanwhile."""
    lengths = (args.input_len, args.input_len), (args.output_len, args.output_len)
    items = random_requests(args.requests, *lengths, vocab=(10, 8000), seed=number)
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    before, begin = llm.stats(), time.process_time()
    outputs = llm.generate([item.prompt_token_ids for item in items], params, use_tqdm=False)
    seconds, after = time.process_time() - begin, llm.stats()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    names = ("num_steps", "num_preemptions", "spec_draft_tokens", "draft_blocks_given_back")
    found = {name: getattr(after, name) - getattr(before, name) for name in names}
    return {"rate": tokens / seconds, "tokens": tokens, **found}


def compare(folder: Path, args: argparse.Namespace, fits: int) -> list[str]:
    """The table's lines for one size of the cache."""
    engines = {name: engine(folder, args, fits, name) for name in args.drafts}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(args.rounds + 1):
        for name, llm in engines.items():
            found = run(llm, args, number)
            if number:
                rounds[name].append(found)
    for llm in engines.values():
        llm.close()
    lines = []
    for name, found in rounds.items():
        mid = {key: statistics.median(one[key] for one in found) for key in found[0]}
        ratio = statistics.median(a["rate"] / b["rate"] for a, b in zip(found, rounds["off"], strict=True))
        per_step = mid["tokens"] / mid["num_steps"]
        cells = [fits, name, f"{mid['rate']:.1f}", f"{ratio:.2f}", f"{per_step:.1f}"]
        cells += [
            f"{mid[key]:.0f}" for key in ("num_preemptions", "spec_draft_tokens", "draft_blocks_given_back")
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fits", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=80)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.8, 0.7, 0.65])
    parser.add_argument("--drafts", nargs="+", default=["off", "adaptive", "always"])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, layers in (("target", 16), ("draft", 2)):
            (folder / kind).mkdir()
            config = {**SHAPE, "num_hidden_layers": layers}
            (folder / kind / "config.json").write_text(json.dumps(config))
        lines = [line for fits in args.fits for line in compare(folder, args, fits)]
    if args.write:
        names = ["requests that fit", "drafts", "tokens/s of CPU time", "of plain", "tokens a step"]
        names += ["preemptions", "drafted", "blocks given back"]
        head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        text = PAGE.read_text()
        before, rest = text.split(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, *head, *lines, END + rest.split(END)[1]]))


if __name__ == "__main__":
    main()
