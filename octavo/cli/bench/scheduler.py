"""`octavo bench scheduler`: the scheduler's own time, without a model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.cli.bench.options import add_integers

if TYPE_CHECKING:
    from octavo.bench.engines import Engines
    from octavo.bench.report import Report

SUMMARY = "microseconds that scheduling a step takes by itself, without a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_integers(
        parser,
        (("--num-seqs", 512, "Requests that run."), ("--num-steps", 200, "Measured decode steps.")),
    )
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Hash full blocks. Default: yes.",
    )


def measure(args: argparse.Namespace, engines: Engines) -> Report:
    from octavo.bench.report import Report
    from octavo.bench.scheduling import SchedulingOptions, measure_scheduling, render_scheduling

    options = SchedulingOptions(args.num_seqs, args.num_steps, prefix_caching=args.enable_prefix_caching)
    runs = []
    for stream in (False, True):
        each = SchedulingOptions(**{**asdict(options), "stream": stream})
        runs.append(measure_scheduling(each))
    return Report("scheduler", asdict(options), {"runs": runs}, runs, render_scheduling(runs))
