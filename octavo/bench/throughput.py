"""Throughput of a workload, offline: all requests given to `LLM` at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.bounds import at_least
from octavo.bench.profile import profile_lines
from octavo.bench.report import table
from octavo.bench.workloads import WorkItem, random_requests, rounds, vocab_bounds
from octavo.errors import RequestError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

_FIRST = 4  # requests of a few tokens, before any other


@dataclass(frozen=True)
class ThroughputOptions:
    """How often a workload is run, and how many requests before it."""

    num_iters: int = 1
    num_warmups: int = 4

    def __post_init__(self) -> None:
        at_least(self, num_iters=1, num_warmups=0)


def measure_throughput(
    llm: LLM,
    items: list[WorkItem],
    params: SamplingParams,
    options: ThroughputOptions | None = None,
    warmups: Sequence[WorkItem] = (),
    on_round: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a workload, each time with an empty prefix cache, after a short warm-up.

    Requests that wait for an answer (multi-turn) run in rounds: all first turns, then all second ones.

    Args:
        params: settings of every request; `max_tokens` is the request's own.
        warmups: requests to run before, beside a few of the engine's own choice.
        on_round: told how many more requests are done.

    Returns:
        The figures and one record per request of the run with the median duration.
    """
    options = options or ThroughputOptions()
    prompts = [_prompt(llm, item) for item in items]
    _warm_up(llm, params, warmups)
    runs = [_run(llm, items, prompts, params, on_round) for _ in range(options.num_iters)]
    ordered = sorted(runs, key=lambda run: float(run[0]["duration_s"]))
    summary, records = ordered[(len(ordered) - 1) // 2]
    return {**summary, "durations_s": [run[0]["duration_s"] for run in runs]}, records


def _run(
    llm: LLM,
    items: list[WorkItem],
    prompts: list[Any],
    params: SamplingParams,
    on_round: Callable[[int], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The workload once: figures, and a record per request."""
    llm.reset_prefix_cache()
    outputs: list[RequestOutput | None] = [None] * len(items)
    before = llm.stats()
    start = time.perf_counter()
    for indices in rounds(items):
        own = [params.clone(max_tokens=items[i].max_tokens) for i in indices]
        for i, output in zip(
            indices, llm.generate([prompts[i] for i in indices], own, use_tqdm=False), strict=True
        ):
            outputs[i] = output
        on_round(len(indices))
    seconds = time.perf_counter() - start
    records = [_record(i, output) for i, output in enumerate(outputs) if output is not None]
    return summarize(records, seconds, llm.stats().num_preemptions - before.num_preemptions), records


def summarize(records: list[dict[str, Any]], seconds: float, preemptions: int) -> dict[str, Any]:
    """The figures of a run."""
    prompt = sum(r["prompt_tokens"] for r in records)
    cached = sum(r["cached_tokens"] for r in records)
    output = sum(r["output_tokens"] for r in records)
    return {
        "duration_s": seconds,
        "num_requests": len(records),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "cached_tokens": cached,
        "cache_hit_rate": cached / prompt if prompt else 0.0,
        "num_preemptions": preemptions,
        "request_throughput": len(records) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }


def render_throughput(summary: dict[str, Any]) -> str:
    """The figures as a table."""
    text = table(
        "Throughput",
        [
            (
                "",
                [
                    ("Requests", summary["num_requests"]),
                    ("Duration (s)", summary["duration_s"]),
                    ("Input tokens", summary["total_input_tokens"]),
                    ("Output tokens", summary["total_output_tokens"]),
                    ("Input tokens from the prefix cache", summary["cached_tokens"]),
                    ("Prefix cache hit rate (%)", summary["cache_hit_rate"] * 100),
                    ("Preemptions", summary["num_preemptions"]),
                    ("Runs, of which this is the median", len(summary["durations_s"])),
                ],
            ),
            (
                "Throughput",
                [
                    ("Requests (req/s)", summary["request_throughput"]),
                    ("Output tokens (tok/s)", summary["output_throughput"]),
                    ("Input and output tokens (tok/s)", summary["total_token_throughput"]),
                ],
            ),
        ],
    )
    return text + profile_lines(summary)


def _prompt(llm: LLM, item: WorkItem) -> Any:
    return item.prompt if item.messages is None else llm.render_chat(item.messages)


def _warm_up(llm: LLM, params: SamplingParams, warmups: Sequence[WorkItem]) -> None:
    length = max(1, min(16, llm.facts.max_model_len - 4))
    vocab = vocab_bounds(llm.facts.vocab_size)
    items = [*random_requests(_FIRST, (length, length), (2, 2), seed=-1, vocab=vocab), *warmups]
    own = [params.clone(max_tokens=item.max_tokens) for item in items]
    llm.generate([item.prompt_token_ids for item in items], own, use_tqdm=False)


def _record(index: int, output: RequestOutput) -> dict[str, Any]:
    times = output.metrics
    return {
        "index": index,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": sum(len(choice.token_ids) for choice in output.outputs),
        "finish_reason": output.outputs[0].finish_reason,
        "ttft_ms": (times.first_token_time - times.arrival_time) * 1e3 if times.first_token_time else None,
        "e2el_ms": (times.finished_time - times.arrival_time) * 1e3 if times.finished_time else None,
    }


def check_fits(llm: LLM, items: list[WorkItem]) -> None:
    """Tell before the run that a request of token ids can't fit the context.

    Raises:
        RequestError: names the lengths.
    """
    limit = llm.facts.max_model_len
    for index, item in enumerate(items):
        if (
            item.text is None
            and item.messages is None
            and len(item.prompt_token_ids) + item.max_tokens > limit
        ):
            raise RequestError(
                f"request {index} has {len(item.prompt_token_ids)} tokens in and {item.max_tokens} out, the "
                f"context (max_model_len) is {limit}: lower input_len or output_len"
            )
