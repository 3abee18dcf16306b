"""`octavo bench growth`: a decode step's time against context and batch."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.bench.options import add_engine, add_integers, bar, engine_config, shown

if TYPE_CHECKING:
    from octavo.bench.engines import Engines
    from octavo.bench.report import Report

SUMMARY = "time of a decode step against context and batch, and against the bytes and products it takes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        ("--context-lens", "Contexts in tokens, at --batch-size. Default: 1024 to 65536 in powers of two."),
        ("--batch-sizes", "Batches in requests, at --context-len. Default: 1 to 512 in powers of two."),
    ):
        parser.add_argument(flag, type=int, nargs="*", metavar="N", help=text)
    add_integers(
        parser,
        (
            ("--batch-size", 4, "Requests while the context grows."),
            ("--context-len", 1024, "Tokens of context while the batch grows."),
            ("--steps", 32, "Decode steps of a run."),
            ("--num-iters", 3, "Runs of a point; their median counts."),
        ),
    )
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/s", help="Rate at which memory is read. Default: measured."
    )
    parser.add_argument(
        "--matrix-rate", type=float, metavar="TFLOP/s", help="Rate of matrix products. Default: measured."
    )
    parser.add_argument("--plot", metavar="FILE", help="Write a picture (SVG).")
    add_engine(parser)


def measure(args: argparse.Namespace, engines: Engines) -> Report:
    from octavo.bench.bandwidth import matrix_rate, read_bandwidth
    from octavo.bench.growth import (
        BATCHES,
        CONTEXTS,
        GrowthOptions,
        MachineRates,
        measure_growth,
        plot_growth,
        render_growth,
        summarize_growth,
    )
    from octavo.bench.report import Report, write
    from octavo.errors import ConfigError

    config = engine_config(args)
    options = GrowthOptions(
        tuple(CONTEXTS if args.context_lens is None else args.context_lens),
        tuple(BATCHES if args.batch_sizes is None else args.batch_sizes),
        args.batch_size,
        args.context_len,
        args.steps,
        args.num_iters,
        config.seed,
    )
    for name, unit in (("bandwidth", "GB/s"), ("matrix_rate", "TFLOP/s")):
        given = getattr(args, name)
        if given is not None and not 0 < given < math.inf:
            raise ConfigError(f"{name}={given} is not valid: give a finite number above 0, in {unit}")
    if "max_model_len" not in args:
        config.max_model_len = options.longest
    if "max_num_seqs" not in args:
        # One more than run: the cache is no larger than all of them could fill, and some of it stays free.
        config.max_num_seqs = max([*options.batch_sizes, options.batch_size]) + 1
    llm = engines.get(config)
    device = llm.facts.summary["device"].partition(" ")[0]
    machine = MachineRates(
        args.bandwidth * 1e9 if args.bandwidth is not None else read_bandwidth(device),
        args.matrix_rate * 1e12
        if args.matrix_rate is not None
        else matrix_rate(device, llm.facts.summary["dtype"]),
    )
    count = len(options.context_lens) + len(options.batch_sizes)
    with bar(count, "Points", args.disable_tqdm) as progress:
        found = measure_growth(llm, options, machine, progress.update)
    name = Path(llm.facts.summary["model"]).name
    if args.plot:
        write(args.plot, plot_growth(found, name), "plot")
    summary = {"model": name, **summarize_growth(found)}
    records = [*summary["by_context"], *summary["by_batch"]]
    settings = {**asdict(options), "engine": shown(config)}
    report = Report("growth", settings, summary, records, render_growth(found))
    return report.marked(config.synthetic_acceptance)
