"""Throughput of a workload, offline: all requests given to `LLM` at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.bench.report import table
from octavo.bench.workloads import WorkItem, random_requests, rounds, vocab_bounds
from octavo.errors import RequestError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

WARMUP = 4  # requests


def measure_throughput(
    llm: LLM,
    items: list[WorkItem],
    params: SamplingParams,
    on_round: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a workload once, after a short warm-up that leaves nothing in the prefix cache.

    Requests that wait for an answer (multi-turn) run in rounds: all first turns, then all second ones.

    Args:
        params: settings of every request; `max_tokens` is the request's own.
        on_round: told how many requests are done.

    Returns:
        The figures, and one record per request.
    """
    prompts = [_prompt(llm, item) for item in items]
    _warm_up(llm, params)
    outputs: list[RequestOutput | None] = [None] * len(items)
    before = llm.stats()
    start = time.perf_counter()
    done = 0
    for indices in rounds(items):
        own = [params.clone(max_tokens=items[i].max_tokens) for i in indices]
        for i, output in zip(
            indices, llm.generate([prompts[i] for i in indices], own, use_tqdm=False), strict=True
        ):
            outputs[i] = output
        done += len(indices)
        on_round(done)
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
    return table(
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


def _prompt(llm: LLM, item: WorkItem) -> Any:
    return item.prompt if item.messages is None else llm.render_chat(item.messages)


def _warm_up(llm: LLM, params: SamplingParams) -> None:
    length = max(1, min(16, llm.facts.max_model_len - 4))
    vocab = vocab_bounds(llm.facts.vocab_size)
    items = random_requests(WARMUP, (length, length), (2, 2), seed=-1, vocab=vocab)
    llm.generate([i.prompt_token_ids for i in items], params.clone(max_tokens=2), use_tqdm=False)
    llm.reset_prefix_cache()


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
