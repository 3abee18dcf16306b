"""`octavo bench throughput`: a workload given to the engine at once."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.cli.bench.options import (
    add_engine,
    add_integers,
    add_profile,
    add_workload,
    bar,
    engine_config,
    shown,
    workload,
)

if TYPE_CHECKING:
    from octavo.bench.engines import Engines
    from octavo.bench.report import Report

SUMMARY = "requests and tokens per second of a workload, offline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_integers(
        parser,
        (
            ("--num-iters", 1, "Times that the workload is run; the figures are those of the median run."),
            (
                "--num-warmups",
                4,
                "Requests before it: of the same kind, with other tokens and short answers.",
            ),
        ),
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy. Default: 0."
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="Go on to the full length. Default: yes, except for a file.",
    )
    parser.add_argument(
        "--disable-detokenize", action="store_true", help="Leave the tokens as ids, without making text."
    )
    add_profile(parser)
    add_engine(parser)


def measure(args: argparse.Namespace, engines: Engines) -> Report:
    from octavo.sampling_params import SamplingParams

    config = engine_config(args)
    spec = workload(args, config.seed)
    ignore_eos = spec.kind != "custom" if args.ignore_eos is None else args.ignore_eos
    detokenize = not (args.disable_detokenize or config.skip_tokenizer_init)
    params = SamplingParams(
        temperature=args.temperature, ignore_eos=ignore_eos, detokenize=detokenize, seed=None
    )

    from octavo.bench.throughput import ThroughputOptions, check_fits, measure_throughput, render_throughput
    from octavo.bench.workloads import vocab_bounds

    options = ThroughputOptions(args.num_iters, args.num_warmups)
    if spec.kind == "custom":
        spec.items()  # a wrong file is told before a model is loaded

    from octavo.bench.profile import profile_run
    from octavo.bench.report import Report

    llm = engines.get(config)
    vocab = vocab_bounds(llm.facts.vocab_size)
    items = spec.items(vocab)
    check_fits(llm, items)
    warmups = spec.warmups(options.num_warmups, vocab)
    with bar(len(items) * options.num_iters, "Requests", args.disable_tqdm) as progress:
        summary, records = measure_throughput(llm, items, params, options, warmups, progress.update)
    if args.profile:
        llm.reset_prefix_cache()
        summary["profile"] = profile_run(llm, items, params)
    sampling = {"temperature": args.temperature, "ignore_eos": ignore_eos, "detokenize": detokenize}
    settings = {**asdict(options), "workload": asdict(spec), **sampling, "engine": shown(config)}
    report = Report("throughput", settings, summary, records, render_throughput(summary))
    return report.marked(config.synthetic_acceptance)
