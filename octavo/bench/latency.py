"""Latency of one fixed batch, offline: how long it takes as a whole, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from octavo.bench.report import table
from octavo.bench.statistics import describe
from octavo.bench.workloads import random_requests, vocab_bounds
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

PERCENTILES = (10.0, 25.0, 75.0, 90.0, 99.0)


@dataclass(frozen=True)
class LatencyOptions:
    """A batch of `batch_size` prompts of `input_len` random ids, `output_len` tokens each, greedy.

    Every iteration has new prompts, so that none is answered from the prefix cache.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters: int = 10
    num_iters_warmup: int = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            low = 0 if name == "num_iters_warmup" else 1
            if value < low:
                raise ConfigError(f"{name}={value} is not valid: give at least {low}")


def measure_latency(
    llm: LLM, options: LatencyOptions, seed: int = 0, on_iteration: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each measured iteration.

    Raises:
        ConfigError: the lengths don't fit the context.
    """
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    vocab = vocab_bounds(llm.facts.vocab_size)
    length, size = options.input_len, options.batch_size
    limit = llm.facts.max_model_len
    if length + options.output_len > limit:
        raise ConfigError(
            f"input_len={length} and output_len={options.output_len} do not fit the context "
            f"(max_model_len) of {limit}: lower one of them"
        )
    times = []
    for i in range(options.num_iters_warmup + options.num_iters):
        batch = random_requests(size, (length, length), (1, 1), seed * 1_000_003 + i, vocab)
        prompts = [item.prompt_token_ids for item in batch]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert made == size * options.output_len
        if i >= options.num_iters_warmup:
            times.append(seconds)
        on_iteration()
    return times


def summarize_latency(times: list[float], options: LatencyOptions) -> dict[str, Any]:
    """All figures of a run; times in milliseconds."""
    milliseconds = describe([t * 1e3 for t in times], PERCENTILES)
    median = milliseconds["median"]
    return {
        **{f"{name}_latency_ms": value for name, value in milliseconds.items() if name != "count"},
        "num_iters": len(times),
        "ms_per_token": median / options.output_len,
        "output_throughput": options.batch_size * options.output_len / median * 1e3,
    }


def render_latency(summary: dict[str, Any], options: LatencyOptions) -> str:
    """The figures as a table."""
    names = ("mean", "std", "min", "p10", "p25", "median", "p75", "p90", "p99", "max")
    batch = f"{options.batch_size} x ({options.input_len} in, {options.output_len} out)"
    rows = [(f"{name} (ms)".capitalize(), summary[f"{name}_latency_ms"]) for name in names]
    return table(
        "Latency",
        [
            ("", [("Batch", batch), ("Iterations", summary["num_iters"])]),
            ("Latency of the whole batch", rows),
            (
                "At the median",
                [
                    ("Time per token and request (ms)", summary["ms_per_token"]),
                    ("Output throughput (tok/s)", summary["output_throughput"]),
                ],
            ),
        ],
    )
