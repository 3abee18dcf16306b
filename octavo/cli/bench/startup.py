"""`octavo bench startup`: from the start of a process to its first token."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.cli.bench.options import add_engine, add_integers, bar, engine_config, shown

if TYPE_CHECKING:
    from octavo.bench.engines import Engines
    from octavo.bench.report import Report

SUMMARY = "time from the start of a process to a ready engine and to its first token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_integers(
        parser,
        (
            ("--num-iters-cold", 1, "Starts with empty caches of compiled GPU kernels."),
            ("--num-iters-warm", 3, "Starts after these, with the caches that they left (or your own)."),
            ("--input-len", 16, "Tokens of the prompt."),
        ),
    )
    add_engine(parser)


def measure(args: argparse.Namespace, engines: Engines) -> Report:
    from octavo.bench.report import Report
    from octavo.bench.startup import StartupOptions, measure_startup, render_startup, summarize_startup

    config = engine_config(args)
    options = StartupOptions(**{name: getattr(args, name) for name in StartupOptions.__dataclass_fields__})
    engines.close()  # the process that is started needs the memory
    count = options.num_iters_cold + options.num_iters_warm
    with bar(count, "Starts", args.disable_tqdm) as progress:
        starts = measure_startup(vars(config), options, progress.update)
    summary = summarize_startup(starts)
    settings = {**asdict(options), "engine": shown(config)}
    records = [asdict(start) for start in starts]
    report = Report("startup", settings, summary, records, render_startup(starts, summary))
    return report.marked(config.synthetic_acceptance)
