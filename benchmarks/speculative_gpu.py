"""Speculation on a GPU: tokens per second, what a step takes and what it costs the host, of random weights.

Usage: python -m benchmarks.speculative_gpu [--parts sweep one fp8] [--seconds N] [--json FILE]

- sweep: 1, 16, 64 and 256 requests; no drafts, 5 each of an EAGLE-3 head of the published shape (fewer where
  a step would have more rows of logits than 256), and as many as pay.
- one: one request; the same head with 3 drafts, and in FP8 with 5; a draft model of 1B; look-ups.
- fp8: one request, weights and KV cache in FP8, with the same head, and with it in FP8, too.

With random weights nothing that is drafted would stand, so acceptance is synthetic: each draft stands with
probability 0.74 if all before it do. With 7 drafts that makes 3.49 tokens a step, which was published for
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B on HumanEval at temperature 1 (huggingface.co/nebius, in the card of
EAGLE3-Llama-3.3-70B-Instruct; it says 2.77, 0.65 each, for MT-bench, and 3.34 for GSM8K). What a step takes
does not depend on it: `at 0.74` and `at 0.65` are times the rate without drafts by the mean of these laws,
where `times off` is of the verdicts that chance gave.

A rate is of the tokens after the first: the time of a run less that of one token for all. Every engine runs
each workload four times (from 64 requests on three times), of which the first ones record its steps; the best
of all but the first counts, as other work of the machine only adds. `floor ms`: bytes of weights that a step
reads, and for each draft those that the draft's model reads, over the memory's bandwidth as measured on an
H200.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.errors import OctavoError
from octavo.worker.model_runner import ModelRunner
from octavo.worker.weight_bytes import step_weight_bytes
from octavo.worker.worker import Worker

SHAPES = Path(__file__).parent / "shapes"
BANDWIDTH = 4.32e12  # bytes a second
RATE, OTHER_RATE = 0.74, 0.65
PROMPT, TOKENS = 128, 512
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


class Watch:
    """Sees what engines do: seconds of the runner's host code, and what drafts."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        self.draft: Any = None
        execute, attach = ModelRunner.execute, Worker._attach_draft

        def timed(runner: ModelRunner, plan: Any) -> Any:
            begin = time.perf_counter()
            launched = execute(runner, plan)
            if not plan.admissions:
                self.seconds += time.perf_counter() - begin
                self.steps += 1
            return launched

        def attached(worker: Worker, draft: Any, *sizes: int) -> Any:
            self.draft = draft.model
            return attach(worker, draft, *sizes)

        ModelRunner.execute = timed  # type: ignore[method-assign]
        Worker._attach_draft = attached  # type: ignore[method-assign]

    def take(self) -> float:
        """Microseconds of a step that admits nobody, since the last call."""
        mean = 1e6 * self.seconds / max(self.steps, 1)
        self.seconds, self.steps = 0.0, 0
        return mean


def speculation(method: str, most: int, adaptive: bool = False, **fields: Any) -> dict[str, Any]:
    """`speculative_config` of `most` drafts that stand at the rate above."""
    rates = [RATE**i for i in range(1, most + 1)]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return {"method": method, "num_speculative_tokens": most, "adaptive": adaptive, **synthetic, **fields}


HEAD = {"model": str(SHAPES / "llama-8b-eagle3")}
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
ONE: dict[str, dict[str, Any]] = {
    "off": {},
    "eagle3, 3": {"speculative_config": speculation("eagle3", 3, **HEAD)},
    "eagle3, 5": {"speculative_config": speculation("eagle3", 5, **HEAD)},
    "eagle3 fp8, 5": {"speculative_config": speculation("eagle3", 5, **HEAD, quantization="fp8")},
    "draft 1B, 4": {"speculative_config": speculation("draft_model", 4, model=str(SHAPES / "llama-1b"))},
    "ngram, 5": {"speculative_config": speculation("ngram", 5, prompt_lookup_min=1)},
    "ngram, adaptive": {"speculative_config": speculation("ngram", 5, True, prompt_lookup_min=1)},
}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "one": ONE,
    "fp8": {
        "off, fp8": FP8,
        "eagle3, 5, fp8": {**ONE["eagle3, 5"], **FP8},
        "eagle3 fp8, 5, fp8": {**ONE["eagle3 fp8, 5"], **FP8},
    },
    "sweep": {
        "off": {},
        "eagle3, 5": dict(ONE["eagle3, 5"]),
        "eagle3, adaptive": {"speculative_config": speculation("eagle3", 5, True, **HEAD)},
    },
}
SIZES = {"one": (1,), "fp8": (1,), "sweep": (1, 16, 64, 256)}


def prompts(n: int) -> list[dict[str, list[int]]]:
    """Texts of tokens that come again and again, so that look-ups find something."""
    return [{"prompt_token_ids": [1000 + 37 * i + j % 32 for j in range(PROMPT)]} for i in range(n)]


def run(llm: LLM, n: int, tokens: int) -> float:
    """Seconds that n requests of so many tokens take."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=i)
        for i in range(n)
    ]
    begin = time.perf_counter()
    llm.generate(prompts(n), params, use_tqdm=False)
    return time.perf_counter() - begin


def measure(llm: LLM, n: int, watch: Watch) -> dict[str, float]:
    """What n requests at once yield."""
    best: dict[str, float] = {}
    tokens, rounds = (TOKENS, 4) if n < 64 else (TOKENS // 2, 3)
    for number in range(rounds):
        llm.reset_prefix_cache()
        first = run(llm, n, 1)
        llm.reset_prefix_cache()
        before = llm.stats()
        watch.take()
        seconds = run(llm, n, tokens) - first
        after = llm.stats()
        steps = after.num_steps - before.num_steps - 1  # but for that of the prompts
        drafts = after.spec_draft_tokens - before.spec_draft_tokens
        found = {
            "tokens/s": n * (tokens - 1) / seconds,
            "ms/step": 1e3 * seconds / steps,
            "tokens/step": (tokens - 1) / steps,
            "drafts": drafts / max(steps, 1) / n,
            "stood": (after.spec_accepted_tokens - before.spec_accepted_tokens) / max(drafts, 1),
            "host µs": watch.take(),
        }
        if number and (not best or found["tokens/s"] > best["tokens/s"]):
            best = found
    return best


def launches(llm: LLM) -> dict[str, float]:
    """Calls of the driver of one request's step, and microseconds that its kernels take."""
    before = llm.stats().num_steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(llm, 1, 96)
    steps = llm.stats().num_steps - before
    calls: Counter[str] = Counter()
    kernels = 0.0
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels += event.time_range.elapsed_us()
        for name in LAUNCHES:
            calls[name] += event.name.startswith(name)
    return {"kernels µs": kernels / steps, **{name: calls[name] / steps for name in LAUNCHES if calls[name]}}


def floor_ms(llm: LLM, watch: Watch, most: int) -> float:
    """The least time of one request's step with `most` drafts."""
    seconds = llm._client.facts.step_weight_bytes / BANDWIDTH
    if watch.draft is not None:
        seconds += most * step_weight_bytes(watch.draft) / BANDWIDTH
    return 1e3 * seconds


def engine(settings: dict[str, Any], most: int) -> LLM:
    """Llama-8B with random weights."""
    return LLM(
        str(SHAPES / "llama-8b"), load_format="dummy", skip_tokenizer_init=True, max_model_len=2048,
        max_num_seqs=max(most, 16), enable_prefix_caching=False, kv_cache_memory_bytes=24 << 30, **settings,
    )  # fmt: skip


def part(name: str, watch: Watch, deadline: float) -> Iterator[dict[str, Any]]:
    """The rows of a part; those for which no time is left are missing."""
    sizes = SIZES[name]
    for label, settings in PARTS[name].items():
        if time.monotonic() > deadline:
            print(f"{name}: no time left for {label}", flush=True)
            continue
        begin, watch.draft = time.perf_counter(), None
        try:
            llm = engine(settings, sizes[-1])
        except (OctavoError, RuntimeError) as error:  # the other rows have figures of their own
            print(f"{name}: {label} failed: {error}", flush=True)
            continue
        try:
            for n in sizes:
                if time.monotonic() > deadline:
                    print(f"{name}: no time left for {label} from {n} requests on", flush=True)
                    break
                row: dict[str, Any] = {
                    "part": name,
                    "drafts by": label,
                    "requests": n,
                    **measure(llm, n, watch),
                }
                if n == 1:
                    row |= {"floor ms": floor_ms(llm, watch, round(row["drafts"]))}
                    if torch.cuda.is_available():
                        row |= launches(llm)
                yield row
        except RuntimeError as error:
            print(f"{name}: {label} failed: {error}", flush=True)
        finally:
            llm.close()
            print(f"{name}: {label} took {time.perf_counter() - begin:.1f} s", flush=True)


def compared(rows: list[dict[str, Any]]) -> None:
    """Add how many times the rate without drafts each is, that of bfloat16, and what it would be at the other
    rate of acceptance."""
    for row in rows:
        plain = [r for r in rows if r["drafts by"] == "off" and r["requests"] == row["requests"]]
        if not plain:
            continue
        row["times off"] = row["tokens/s"] / plain[0]["tokens/s"]
        drafts = round(row["drafts"])
        if row["requests"] == 1 and drafts:
            for rate in (RATE, OTHER_RATE):
                tokens = sum(rate**i for i in range(drafts + 1))
                row[f"at {rate}"] = tokens / row["ms/step"] * 1e3 / plain[0]["tokens/s"]
            row["over floor"] = row["ms/step"] / row["floor ms"] - 1


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    for line in (names, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["sweep", "one", "fp8"])
    parser.add_argument("--seconds", type=float, default=150.0, help="no engine is started after so long")
    parser.add_argument("--json", type=Path, help="where the rows are written as they come")
    args = parser.parse_args()
    deadline, watch, rows = time.monotonic() + args.seconds, Watch(), list[dict[str, Any]]()
    if "sweep" in args.parts:  # which has these
        for label in ("off", "eagle3, 5"):
            del PARTS["one"][label]
    for name in args.parts:
        for row in part(name, watch, deadline):
            rows.append(row)
            compared(rows)
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if rows:
        show(rows)


if __name__ == "__main__":
    main()
