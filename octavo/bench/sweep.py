"""Throughput and latency against the number of requests under way, offline or of a server."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.bounds import at_least
from octavo.bench.plot import Chart, Series, draw
from octavo.bench.report import Row, table
from octavo.bench.serve import Driver, ServeOptions, ServeRun, summarize_serve
from octavo.bench.statistics import describe
from octavo.bench.workloads import VOCAB, Bounds, WorkItem, random_requests, vocab_bounds
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class SweepOptions:
    """What is measured at each point.

    Attributes:
        concurrency: requests under way, one point each.
        input_len, output_len: tokens of each request, the same for all.
        seconds: how long a point goes on; a wave of requests that has begun is finished.
        max_seconds: the sweep ends before a point whose first wave would take longer, by the point before.
        seed: of the prompts.
    """

    concurrency: Sequence[int] = POWERS
    input_len: int = 128
    output_len: int = 128
    seconds: float = 3.0
    max_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, input_len=1, output_len=2, seconds=0, max_seconds=0)
        if math.isinf(self.seconds):
            raise ConfigError(f"seconds={self.seconds} is not valid: a point has to end")
        levels = list(self.concurrency)
        if not levels or levels[0] < 1 or levels != sorted(set(levels)):
            raise ConfigError(f"concurrency={levels} is not valid: give rising numbers from 1 on")


@dataclass
class SweepPoint:
    """One number of requests under way; times in milliseconds.

    `itl_ms` holds mean, median and p99 of the times between tokens: of a server of all gaps, offline of the
    requests' means.
    """

    concurrency: int
    num_requests: int
    duration_s: float
    output_throughput: float
    total_token_throughput: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]


@dataclass
class Sweep:
    """Points in order, why the last ones are missing, and by which rates drafts stood if by chance."""

    points: list[SweepPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    synthetic: list[float] | None = None


OnPoint = Callable[[], None]


def sweep_offline(llm: LLM, options: SweepOptions, on_point: OnPoint = lambda: None) -> Sweep:
    """Points of `LLM`: at each, waves of as many requests as it says, given at once.

    Raises:
        ConfigError: the lengths don't fit the context, or `max_num_seqs` is below a point.
    """
    limit, seqs = llm.facts.max_model_len, llm.config.max_num_seqs
    if options.input_len + options.output_len > limit:
        raise ConfigError(
            f"input_len={options.input_len} and output_len={options.output_len} do not fit the context "
            f"(max_model_len) of {limit}: lower one of them"
        )
    if max(options.concurrency) > seqs:
        raise ConfigError(
            f"concurrency={max(options.concurrency)} is above max_num_seqs={seqs}: raise this, or "
            "lower the points"
        )
    found = Sweep(synthetic=llm.config.synthetic_acceptance)
    vocab = vocab_bounds(llm.facts.vocab_size)
    seeds = itertools.count(options.seed * 1_000_003)
    wave_seconds = 0.0
    for level in options.concurrency:
        if _is_over(found, options, level, wave_seconds):
            break
        _wave(llm, _items(options, level, next(seeds), vocab, 4))  # records what this size needs
        runs: list[tuple[float, list[Any]]] = []
        until = time.perf_counter() + options.seconds
        while not runs or time.perf_counter() < until:
            runs.append(_wave(llm, _items(options, level, next(seeds), vocab)))
        wave_seconds = min(seconds for seconds, _ in runs)
        found.points.append(_offline_point(level, runs, options))
        on_point()
    return found


async def sweep_server(
    driver: Driver, options: SweepOptions, vocab: Bounds = VOCAB, on_point: OnPoint = lambda: None
) -> Sweep:
    """Points of a server: at each, `driver` keeps as many requests under way as it says.

    Args:
        vocab: the least and largest token id of prompts.

    Raises:
        RequestFailed: no server, or every request of a point failed.
    """
    found = Sweep()
    await driver.prepare()
    seeds = itertools.count(options.seed * 1_000_003)
    wave_seconds = 0.0
    before = 0
    for level in options.concurrency:
        if _is_over(found, options, level, wave_seconds):
            break
        await _serve_wave(driver, level, _items(options, level, next(seeds), vocab, 4))
        # As many waves as the time has room for, if one takes longer in proportion to the requests at worst.
        guess = wave_seconds * level / before if before else 0.0
        waves = max(1, int(options.seconds / guess)) if guess else 1
        run = await _serve_wave(driver, level, _items(options, level * waves, next(seeds), vocab))
        summary = summarize_serve(run, {}, (99.0,))
        if summary["failed"]:
            raise OctavoError(
                f"{summary['failed']} of {len(run.records)} requests failed: {summary['errors']}"
            )
        wave_seconds, before = run.duration_s / waves, level
        found.points.append(_server_point(level, summary))
        found.synthetic = run.synthetic
        found.notes += [note for note in run.notes if note not in found.notes]
        on_point()
    return found


def _is_over(found: Sweep, options: SweepOptions, level: int, wave_seconds: float) -> bool:
    """Whether the next point would take too long, if it takes as much longer as it has more requests."""
    if not found.points:
        return False
    expected = wave_seconds * level / found.points[-1].concurrency
    # Batches cost less than that: a quarter of it is still certain to be too long.
    if expected / 4 <= options.max_seconds:
        return False
    found.notes.append(
        f"stopped before concurrency {level}: one wave would take some {expected:.0f} s or less"
    )
    return True


def _items(
    options: SweepOptions, count: int, seed: int, vocab: Bounds, output_len: int | None = None
) -> list[WorkItem]:
    length = (options.input_len, options.input_len)
    out = options.output_len if output_len is None else min(output_len, options.output_len)
    return random_requests(count, length, (out, out), seed, vocab)


def _wave(llm: LLM, items: list[WorkItem]) -> tuple[float, list[Any]]:
    llm.reset_prefix_cache()
    params = SamplingParams(
        temperature=0.0, max_tokens=items[0].max_tokens, ignore_eos=True, detokenize=False
    )
    begin = time.perf_counter()
    outputs = llm.generate([item.prompt_token_ids for item in items], params, use_tqdm=False)
    return time.perf_counter() - begin, outputs


def _offline_point(level: int, runs: list[tuple[float, list[Any]]], options: SweepOptions) -> SweepPoint:
    times = [output.metrics for _, outputs in runs for output in outputs]
    if any(t is None or not t.first_token_time for t in times):
        raise RequestError("a request ended without a token")
    seconds = sum(duration for duration, _ in runs)
    count = level * len(runs)
    gaps = options.output_len - 1
    return SweepPoint(
        level,
        count,
        seconds,
        count * options.output_len / seconds,
        count * (options.input_len + options.output_len) / seconds,
        _three([(t.first_token_time - t.arrival_time) * 1e3 for t in times]),
        _three([(t.last_token_time - t.first_token_time) / gaps * 1e3 for t in times]),
    )


def _server_point(level: int, summary: dict[str, Any]) -> SweepPoint:
    names = ("mean", "median", "p99")
    return SweepPoint(
        level,
        summary["completed"],
        summary["duration_s"],
        summary["output_throughput"],
        summary["total_token_throughput"],
        {name: summary[f"{name}_ttft_ms"] for name in names},
        {name: summary[f"{name}_itl_ms"] for name in names},
    )


def _three(samples: list[float]) -> dict[str, float]:
    found = describe(samples, (99.0,))
    return {name: found[name] for name in ("mean", "median", "p99")}


async def _serve_wave(driver: Driver, level: int, items: list[WorkItem]) -> ServeRun:
    driver.limit(level)
    return await driver.run(items, lambda record: None)


def serve_options(options: SweepOptions, model: str | None) -> ServeOptions:
    """How a sweep's requests are sent to a server."""
    return ServeOptions(model=model, ignore_eos=True, seed=options.seed)


def render_sweep(found: Sweep, options: SweepOptions) -> str:
    """The figures as a table."""
    rows: list[Row] = [
        (
            f"{point.concurrency:>4}",
            f"{point.output_throughput:11.1f} {point.itl_ms['mean']:9.3f} {point.itl_ms['p99']:9.3f} "
            f"{point.ttft_ms['mean']:9.1f}",
        )
        for point in found.points
    ]
    title = f"out tok/s   ITL mean   ITL p99  TTFT ms ({options.input_len} in, {options.output_len} out)"
    text = table("Concurrency", [(title, rows)])
    return text + "".join(f"\nnote: {note}" for note in found.notes)


def plot_sweep(found: Sweep, options: SweepOptions, name: str) -> str:
    """Throughput and time between tokens against concurrency, as SVG."""
    points = found.points
    throughput = Chart("Throughput", "requests under way", "output tokens/s")
    throughput.series.append(Series("output", [(p.concurrency, p.output_throughput) for p in points]))
    itl = Chart("Time between tokens", "requests under way", "ms")
    for key in ("mean", "p99"):
        itl.series.append(Series(key, [(p.concurrency, p.itl_ms[key]) for p in points]))
    caption = f"{name}, requests of {options.input_len} tokens in and {options.output_len} out"
    return draw([throughput, itl], caption)
