"""`octavo bench latency`: the time of one fixed batch, of its first tokens and of a decode step."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.cli.bench.options import add_engine, add_integers, add_profile, bar, engine_config, shown

if TYPE_CHECKING:
    from octavo.bench.engines import Engines
    from octavo.bench.report import Report

SUMMARY = "time of one fixed batch and of its decode steps, offline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_integers(
        parser,
        (
            ("--input-len", 32, "Tokens of each prompt."),
            ("--output-len", 128, "Tokens that each request makes."),
            ("--batch-size", 8, "Requests in the batch."),
            ("--num-iters", 10, "Measured iterations."),
            ("--num-iters-warmup", 2, "Iterations before these."),
        ),
    )
    add_profile(parser)
    add_engine(parser)


def measure(args: argparse.Namespace, engines: Engines) -> Report:
    from octavo.bench.latency import (
        LatencyOptions,
        measure_latency,
        profile_latency,
        render_latency,
        summarize_latency,
    )
    from octavo.bench.report import Report

    options = LatencyOptions(**{name: getattr(args, name) for name in LatencyOptions.__dataclass_fields__})
    config = engine_config(args)
    llm = engines.get(config)
    with bar(options.num_iters_warmup + options.num_iters, "Iterations", args.disable_tqdm) as progress:
        iterations = measure_latency(llm, options, config.seed, progress.update)
    summary = summarize_latency(iterations, options)
    if config.torch_profiler_dir is not None and args.profile:
        summary["profile"] = profile_latency(llm, options, config.seed)
    records = [
        {
            "latency_ms": each.seconds * 1e3,
            "first_token_ms": None if each.first_seconds is None else each.first_seconds * 1e3,
        }
        for each in iterations
    ]
    settings = {**asdict(options), "engine": shown(config)}
    report = Report("latency", settings, summary, records, render_latency(summary, options))
    return report.marked(config.synthetic_acceptance)
