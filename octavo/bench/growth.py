"""How a decode step's time grows with context and batch, against the bytes that it must read and the products
that it must compute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.bench.bounds import at_least
from octavo.bench.plot import Chart, Series, draw
from octavo.bench.report import Row, table
from octavo.bench.statistics import describe
from octavo.bench.workloads import random_requests, vocab_bounds
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.step_messages import ModelFacts

TOLERANCE = 0.2  # of the predicted time: beyond it a point is flagged

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class GrowthOptions:
    """Points: every context at `batch_size` requests, then every batch at `context_len` tokens.

    Attributes:
        steps: decode steps of a run.
        num_iters: runs of a point, of which the median counts.
        seed: of the prompts, which are all different.
    """

    context_lens: Sequence[int] = CONTEXTS
    batch_sizes: Sequence[int] = BATCHES
    batch_size: int = 4
    context_len: int = 1024
    steps: int = 32
    num_iters: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, batch_size=1, context_len=1, steps=1, num_iters=1)
        for name in ("context_lens", "batch_sizes"):
            given = list(getattr(self, name))
            if given != sorted(set(given)) or (given and given[0] < 1):
                raise ConfigError(f"{name}={given} is not valid: give rising numbers from 1 on")
        if not self.context_lens and not self.batch_sizes:
            raise ConfigError("context_lens and batch_sizes are both empty: give points of one of them")

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max([*self.context_lens, self.context_len if self.batch_sizes else 0]) + self.steps + 2


@dataclass(frozen=True)
class MachineRates:
    """What a device can do: bytes read and matrix operations, a second."""

    bandwidth: float
    matrix_rate: float

    def floor_ms(self, weight_bytes: float, operations: float, kv_bytes: float) -> float:
        """Least time of a step: see `GrowthPoint`."""
        weights = max(weight_bytes / self.bandwidth, operations / self.matrix_rate)
        return (weights + kv_bytes / self.bandwidth) * 1e3


@dataclass
class GrowthPoint:
    """One context and batch.

    Attributes:
        context_len: tokens of context when the run begins.
        context: tokens in front of the token that a step computes, on average over the run.
        step_ms: median time of a decode step.
        weight_bytes, kv_bytes: what a step reads of each at most.
        operations: of its products with weights; 0 if these are stored in another form than computed with.
        floor_ms: the weights' bytes at the measured bandwidth, or if they take longer the operations at the
            measured rate, and the KV's bytes.
        predicted_ms: the floor, and what the sweep's first point took beyond its own.
        deviation: of the time from the prediction, as a share of it.
    """

    context_len: int
    context: float
    batch_size: int
    step_ms: float
    weight_bytes: int
    kv_bytes: int
    operations: float
    floor_ms: float
    predicted_ms: float = 0.0
    deviation: float = 0.0

    @property
    def flagged(self) -> bool:
        """Whether the time doesn't follow bytes and operations."""
        return abs(self.deviation) > TOLERANCE


@dataclass
class Growth:
    """Points by context and by batch, in rising order; `notes` tell of those that are missing."""

    machine: MachineRates
    by_context: list[GrowthPoint] = field(default_factory=list)
    by_batch: list[GrowthPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def kv_bytes_per_request(facts: ModelFacts, context: float) -> float:
    """Bytes of KV that one request's next token reads, with `context` tokens before it."""
    total = 0.0
    for group in facts.groups:
        seen = context if group.sliding_window is None else min(context, group.sliding_window)
        total += seen * group.block_bytes() / group.format.block_size
    return total


def measure_growth(
    llm: LLM, options: GrowthOptions, machine: MachineRates, on_point: Callable[[], None] = lambda: None
) -> Growth:
    """All points. Prompts are computed once and found in the prefix cache by the runs that count.

    Args:
        machine: what the device can do.

    Raises:
        ConfigError: the engine keeps no prefix cache, or a context doesn't fit it.
    """
    if not llm.config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching=False is not valid here: contexts come from the cache")
    if options.longest > llm.facts.max_model_len:
        raise ConfigError(
            f"a context of {options.longest} tokens is beyond max_model_len={llm.facts.max_model_len}: raise "
            "this, or give shorter context_lens"
        )
    found = Growth(machine)
    contexts = [(context, options.batch_size) for context in options.context_lens]
    batches = [(options.context_len, batch) for batch in options.batch_sizes]
    for points, wanted in ((found.by_context, contexts), (found.by_batch, batches)):
        llm.reset_prefix_cache()
        fitting = []
        for context, batch in wanted:
            reason = _why_not(llm, options, context, batch)
            if reason is None:
                fitting.append((context, batch))
            else:
                found.notes.append(f"{batch} x {context} tokens left out: {reason}")
                on_point()
        if not fitting:
            continue
        # Shorter prompts are beginnings of the longest ones, so the largest point computes all.
        most, length = max(batch for _, batch in fitting), max(context for context, _ in fitting)
        vocab = vocab_bounds(llm.facts.vocab_size)
        prompts = [
            item.prompt_token_ids
            for item in random_requests(most, (length + 1, length + 1), (1, 1), options.seed + 17, vocab)
        ]
        for context, batch in reversed(fitting):
            points.insert(
                0, _measure_point(llm, options, [p[: context + 1] for p in prompts[:batch]], machine)
            )
            on_point()
        predict(points)
    return found


def predict(points: Sequence[GrowthPoint]) -> None:
    """Fill in what each point should take: its bytes' time, and the fixed cost that the first point shows."""
    fixed = points[0].step_ms - points[0].floor_ms
    for point in points:
        point.predicted_ms = point.floor_ms + fixed
        point.deviation = point.step_ms / point.predicted_ms - 1.0


def _why_not(llm: LLM, options: GrowthOptions, context: int, batch: int) -> str | None:
    """Why a point cannot be measured, if so."""
    if batch > llm.config.max_num_seqs:
        return f"max_num_seqs is {llm.config.max_num_seqs}"
    block = llm.config.block_size
    needed = batch * -(-(context + options.steps + 2) // block) * len(llm.facts.groups)
    # The scheduler keeps a hundredth of the pool free, where requests could be preempted otherwise.
    room = llm.facts.num_blocks - llm.facts.num_blocks // 50 - 1
    return f"they need {needed} KV blocks of {room}" if needed > room else None


def _measure_point(
    llm: LLM, options: GrowthOptions, prompts: list[list[int]], machine: MachineRates
) -> GrowthPoint:
    # The token after the context is the one row that the cache doesn't hold (of contexts of whole blocks).
    context, batch = len(prompts[0]) - 1, len(prompts)
    _run(llm, prompts, 1)  # computes what the cache doesn't hold
    _run(llm, prompts, options.steps + 1)  # records what steps of this size need
    samples = []
    for _ in range(options.num_iters):
        short = _run(llm, prompts, 1)
        samples.append((_run(llm, prompts, options.steps + 1) - short) / options.steps * 1e3)
    middle = context + 1 + options.steps / 2
    weights = llm.facts.step_weight_bytes
    kv = round(batch * kv_bytes_per_request(llm.facts, middle))
    operations = 2.0 * batch * weights / _weight_size(llm.facts)
    floor = machine.floor_ms(weights, operations, kv)
    return GrowthPoint(context, middle, batch, describe(samples)["median"], weights, kv, operations, floor)


def _weight_size(facts: ModelFacts) -> float:
    """Bytes of a weight; infinite where weights are quantized, whose number their bytes don't tell."""
    if facts.summary["weights"] != "as dtype":
        return math.inf
    return 4.0 if facts.summary["dtype"] == "float32" else 2.0


def _run(llm: LLM, prompts: list[list[int]], count: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def summarize_growth(found: Growth) -> dict[str, Any]:
    """All figures."""

    def points(given: Sequence[GrowthPoint]) -> list[dict[str, Any]]:
        return [{**asdict(point), "flagged": point.flagged} for point in given]

    every = [*found.by_context, *found.by_batch]
    return {
        "bandwidth_bytes_per_s": found.machine.bandwidth,
        "matrix_operations_per_s": found.machine.matrix_rate,
        "by_context": points(found.by_context),
        "by_batch": points(found.by_batch),
        "worst_deviation": max((abs(p.deviation) for p in every), default=None),
        "flagged": sum(point.flagged for point in every),
        "notes": found.notes,
    }


def render_growth(found: Growth) -> str:
    """The figures as a table; flagged points have an exclamation mark."""

    def rows(points: Sequence[GrowthPoint]) -> list[Row]:
        return [
            (
                f"{p.batch_size:>4} x {p.context_len:>6}",
                f"{p.step_ms:8.3f} {p.predicted_ms:8.3f} {p.deviation:+6.1%}{'!' if p.flagged else ' '}"
                f"{p.floor_ms:8.3f}",
            )
            for p in points
        ]

    head = "ms a step  predicted  off  floor"
    text = table(
        "Growth of a decode step",
        [
            (
                "",
                [
                    ("Memory read (GB/s)", found.machine.bandwidth / 1e9),
                    ("Matrix products (TFLOP/s)", found.machine.matrix_rate / 1e12),
                ],
            ),
            (f"by context: {head}", rows(found.by_context)),
            (f"by batch: {head}", rows(found.by_batch)),
        ],
    )
    return text + "".join(f"\nnote: {note}" for note in found.notes)


def plot_growth(found: Growth, name: str) -> str:
    """Measured, predicted and least times against context and batch, as SVG."""
    charts = []
    for title, label, points in (
        ("A step against context", "tokens of context", found.by_context),
        ("A step against batch", "requests", found.by_batch),
    ):
        if not points:
            continue
        xs = [float(p.batch_size if points is found.by_batch else p.context_len) for p in points]
        chart = Chart(title, label, "ms")
        for series, values, dashed in (
            ("measured", [p.step_ms for p in points], False),
            ("predicted", [p.predicted_ms for p in points], True),
            ("least", [p.floor_ms for p in points], True),
        ):
            chart.series.append(Series(series, list(zip(xs, values, strict=True)), dashed))
        charts.append(chart)
    return draw(charts, f"{name}; predicted: bytes and products at the measured rates, and a fixed cost")
