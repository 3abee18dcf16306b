"""What scheduling costs by itself: steps of many running requests, without a model."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.bench.report import table
from octavo.bench.statistics import describe
from octavo.bench.workloads import random_requests
from octavo.engine.limits import SchedulerLimits
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.keys import BlockHasher
from octavo.kv.manager import KVManager
from octavo.messages import CoreRequest
from octavo.sampling_params import SamplingParams
from octavo.step_messages import StepResult

_BLOCK = 16
_VOCAB = 32000
_PROMPTS = (100, 355)  # lengths: spread over blocks, so that no step begins all of them
_BUDGET = 8192
_MOST_SEQS, _MOST_STEPS = 8192, 10_000  # tables of all tokens are 300 MB then


@dataclass(frozen=True)
class SchedulingOptions:
    """Decode steps of `num_seqs` running requests.

    Attributes:
        num_steps: measured steps.
        stream: whether every token is reported at once, as to a server's clients, or only when all are there.
        prefix_caching: whether full blocks are hashed.
        ahead: whether a step is scheduled before the one before it is taken in, as on a GPU.
    """

    num_seqs: int = 512
    num_steps: int = 200
    stream: bool = False
    prefix_caching: bool = True
    ahead: bool = True

    def __post_init__(self) -> None:
        for name, most in (("num_seqs", _MOST_SEQS), ("num_steps", _MOST_STEPS)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: give from 1 to {most}")


def measure_scheduling(options: SchedulingOptions) -> dict[str, Any]:
    """Microseconds of a step's `schedule` and `update`: mean, median, p99.

    They are this thread's CPU time: nothing waits here, and other work on the machine doesn't count.
    """
    scheduler = make_scheduler(options)
    tokens = np.random.default_rng(0).integers(1000, _VOCAB, (options.num_seqs, 1), dtype=np.int32)
    times: dict[str, list[float]] = {"schedule": [], "update": []}
    pending = None
    steady = 0
    while steady < options.num_steps:
        begin = time.thread_time()
        step = scheduler.schedule()
        scheduled = time.thread_time()
        assert step is not None, "a request ended or none could run"
        previous, pending = (pending, step) if options.ahead else (step, None)
        if previous is None:
            continue
        plan = previous.plan
        result = StepResult(tokens[: len(plan.slots)], plan.samples.astype(np.int32))
        updating = time.thread_time()
        scheduler.update(previous, result)
        done = time.thread_time()
        # Prompts are computed first; what counts is that all requests decode.
        if len(plan.slots) == options.num_seqs and plan.total_rows == options.num_seqs:
            steady += 1
            times["schedule"].append((scheduled - begin) * 1e6)
            times["update"].append((done - updating) * 1e6)
    figures: dict[str, Any] = dict(asdict(options))
    for name, samples in times.items():
        found = describe(samples, (99.0,))
        figures |= {f"{key}_{name}_us": found[key] for key in ("mean", "median", "p99")}
    figures["mean_step_us"] = figures["mean_schedule_us"] + figures["mean_update_us"]
    figures["median_step_us"] = figures["median_schedule_us"] + figures["median_update_us"]
    return figures


def make_scheduler(options: SchedulingOptions) -> Scheduler:
    """A scheduler with room for all, and as many requests waiting as will run."""
    total = _PROMPTS[1] + options.num_steps + 64 + options.num_seqs * _PROMPTS[1] // _BUDGET
    group = KVGroup("full", (0,), KVFormat("bfloat16", _BLOCK, 8, 128))
    blocks = options.num_seqs * (-(-total // _BLOCK) + 1) * 51 // 50 + 2
    hasher = BlockHasher("sha256", bytes(32), _BLOCK) if options.prefix_caching else None
    limits = SchedulerLimits(options.num_seqs, _BUDGET, total + 1, _VOCAB)
    scheduler = Scheduler(limits, KVManager([group], blocks, hasher))
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
    for number, item in enumerate(random_requests(options.num_seqs, _PROMPTS, (1, 1))):
        prompt = item.prompt_token_ids
        own = params.clone(max_tokens=total - len(prompt))
        scheduler.add(CoreRequest(request_id=str(number), prompt_token_ids=prompt, params=own, seed=number,
                                  stream=options.stream))  # fmt: skip
    return scheduler


def render_scheduling(runs: list[dict[str, Any]]) -> str:
    """The figures as a table."""
    sections = []
    for run in runs:
        kind = "every token told" if run["stream"] else "told at the end"
        rows = [
            (f"{name} (us), mean / median / p99", " / ".join(f"{run[f'{k}_{name}_us']:.0f}" for k in keys))
            for name in ("schedule", "update")
            for keys in (("mean", "median", "p99"),)
        ]
        sections.append((f"{run['num_seqs']} running, {kind}", rows))
    return table("Scheduling of a decode step", sections)
