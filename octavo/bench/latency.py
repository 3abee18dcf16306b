"""Latency of one fixed batch, offline: as a whole, of its first tokens, and of a decode step by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.bounds import at_least
from octavo.bench.profile import profile_lines, profile_run
from octavo.bench.report import Row, table
from octavo.bench.statistics import describe
from octavo.bench.workloads import WorkItem, random_requests, vocab_bounds
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

PERCENTILES = (10.0, 25.0, 75.0, 90.0, 99.0)

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class LatencyOptions:
    """A batch of `batch_size` prompts of `input_len` random ids, `output_len` tokens each, greedy.

    Every iteration has new prompts and an empty prefix cache.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters: int = 10
    num_iters_warmup: int = 2

    def __post_init__(self) -> None:
        at_least(self, input_len=1, output_len=1, batch_size=1, num_iters=1, num_iters_warmup=0)


@dataclass(frozen=True)
class Iteration:
    """Seconds of the whole batch, and of one that ends with its first tokens (None: it is the same)."""

    seconds: float
    first_seconds: float | None

    def decode_step_ms(self, options: LatencyOptions) -> float | None:
        """Milliseconds of a step that gives every request one more token: the difference of both runs."""
        if self.first_seconds is None:
            return None
        return (self.seconds - self.first_seconds) / (options.output_len - 1) * 1e3


def measure_latency(
    llm: LLM, options: LatencyOptions, seed: int = 0, on_iteration: Callable[[], None] = lambda: None
) -> list[Iteration]:
    """The measured iterations.

    Raises:
        ConfigError: the lengths don't fit the context.
    """
    length, limit = options.input_len, llm.facts.max_model_len
    if length + options.output_len > limit:
        raise ConfigError(
            f"input_len={length} and output_len={options.output_len} do not fit the context "
            f"(max_model_len) of {limit}: lower one of them"
        )
    iterations = []
    for i in range(-options.num_iters_warmup, options.num_iters):
        long = _timed(llm, _batch(llm, options, options.output_len, seed, 100 + i))
        short = None
        if options.output_len > 1:
            short = _timed(llm, _batch(llm, options, 1, seed, 200 + i))
        if i >= 0:
            iterations.append(Iteration(long, short))
        on_iteration()
    return iterations


def profile_latency(llm: LLM, options: LatencyOptions, seed: int = 0) -> dict[str, Any]:
    """A profile of one more iteration; see `profile_run`."""
    llm.reset_prefix_cache()
    return profile_run(llm, _batch(llm, options, options.output_len, seed, 300), GREEDY)


def _batch(llm: LLM, options: LatencyOptions, output_len: int, seed: int, number: int) -> list[WorkItem]:
    length = (options.input_len, options.input_len)
    vocab = vocab_bounds(llm.facts.vocab_size)
    return random_requests(
        options.batch_size, length, (output_len, output_len), seed * 1_000_003 + number, vocab
    )


def _timed(llm: LLM, items: list[WorkItem]) -> float:
    llm.reset_prefix_cache()
    params = GREEDY.clone(max_tokens=items[0].max_tokens)
    prompts = [item.prompt_token_ids for item in items]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(o.outputs[0].token_ids) == items[0].max_tokens for o in outputs)
    return seconds


def summarize_latency(iterations: Sequence[Iteration], options: LatencyOptions) -> dict[str, Any]:
    """All figures of a run; times in milliseconds."""
    whole = describe([each.seconds * 1e3 for each in iterations], PERCENTILES)
    median = whole["median"]
    firsts = [each.first_seconds for each in iterations if each.first_seconds is not None]
    steps = [s for each in iterations if (s := each.decode_step_ms(options)) is not None]
    return {
        **{f"{name}_latency_ms": value for name, value in whole.items() if name != "count"},
        "num_iters": len(iterations),
        "median_first_token_ms": describe(s * 1e3 for s in firsts)["median"] if firsts else median,
        "median_decode_step_ms": describe(steps)["median"] if steps else None,
        "ms_per_token": median / options.output_len,
        "output_throughput": options.batch_size * options.output_len / median * 1e3,
    }


def render_latency(summary: dict[str, Any], options: LatencyOptions) -> str:
    """The figures as a table."""
    names = ("mean", "std", "min", "p10", "p25", "median", "p75", "p90", "p99", "max")
    batch = f"{options.batch_size} x ({options.input_len} in, {options.output_len} out)"
    rows = [(f"{name} (ms)".capitalize(), summary[f"{name}_latency_ms"]) for name in names]
    medians: list[Row] = [("Time to the first tokens (ms)", summary["median_first_token_ms"])]
    if summary["median_decode_step_ms"] is not None:
        medians.append(("Time of a decode step (ms)", summary["median_decode_step_ms"]))
    medians += [
        ("Time per token and request (ms)", summary["ms_per_token"]),
        ("Output throughput (tok/s)", summary["output_throughput"]),
    ]
    sections: list[tuple[str, Sequence[Row]]] = [
        ("", [("Batch", batch), ("Iterations", summary["num_iters"])]),
        ("Latency of the whole batch", rows),
        ("At the median", medians),
    ]
    return table("Latency", sections) + profile_lines(summary)
