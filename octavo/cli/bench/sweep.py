"""`octavo bench sweep`: throughput and latency against concurrency, with a plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.bench.options import (
    add_engine,
    add_integers,
    add_vocab_size,
    bar,
    engine_config,
    server_vocab,
    shown,
)
from octavo.cli.bench.serve import authorization

if TYPE_CHECKING:
    from octavo.bench.engines import Engines
    from octavo.bench.report import Report
    from octavo.bench.sweep import Sweep, SweepOptions

SUMMARY = "throughput and time between tokens against concurrency, offline or of a server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="Requests under way, a point each. Default: 1 2 4 8 16 32 64 128 256 512.",
    )
    add_integers(
        parser,
        (("--input-len", 128, "Tokens of each prompt."), ("--output-len", 128, "Tokens to make, each.")),
    )
    for flag, default, text in (
        ("--seconds", 3.0, "How long each point goes on."),
        ("--max-seconds", 60.0, "End before a point whose requests would surely take longer than this."),
    ):
        parser.add_argument(
            flag, type=float, default=default, metavar="S", help=f"{text} Default: {default:g}."
        )
    parser.add_argument("--plot", metavar="FILE", help="Write a picture (SVG).")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", metavar="URL", help="Measure this server instead of an engine in this process."
    )
    server.add_argument("--api-key", metavar="KEY", help="Default: OPENAI_API_KEY of the environment.")
    add_vocab_size(server)
    add_engine(parser)


def measure(args: argparse.Namespace, engines: Engines) -> Report:
    from octavo.bench.report import Report, write
    from octavo.bench.sweep import POWERS, SweepOptions, plot_sweep, render_sweep

    config = engine_config(args)
    options = SweepOptions(
        tuple(args.concurrency or POWERS),
        args.input_len,
        args.output_len,
        args.seconds,
        args.max_seconds,
        config.seed,
    )
    settings: dict[str, Any] = asdict(options)
    progress = partial(bar, len(options.concurrency), "Points", args.disable_tqdm)
    if args.base_url:
        found, name = _of_server(args, config.model, options, progress)
        settings["base_url"] = args.base_url
    else:
        from octavo.bench.sweep import sweep_offline

        if "max_num_seqs" not in args:
            config.max_num_seqs = max(options.concurrency)
        llm = engines.get(config)
        with progress() as points_done:
            found = sweep_offline(llm, options, points_done.update)
        name = Path(llm.facts.summary["model"]).name
        settings["engine"] = shown(config)
    if args.plot:
        write(args.plot, plot_sweep(found, options, name), "plot")
    points = [asdict(point) for point in found.points]
    summary = {"model": name, "notes": found.notes, "points": points}
    return Report("sweep", settings, summary, points, render_sweep(found, options)).marked(found.synthetic)


def _of_server(
    args: argparse.Namespace, model: str | None, options: SweepOptions, progress: Callable[[], Any]
) -> tuple[Sweep, str]:
    from octavo.bench.client import HttpClient, Target
    from octavo.bench.serve import Driver, run_async
    from octavo.bench.sweep import serve_options, sweep_server
    from octavo.bench.words import WordText

    client = HttpClient(Target.parse(args.base_url), authorization(args.api_key))
    driver = Driver(client, serve_options(options, model), WordText())
    vocab = server_vocab(args)

    async def main() -> Sweep:
        try:
            with progress() as points_done:
                return await sweep_server(driver, options, vocab, points_done.update)
        finally:
            client.close()

    return run_async(main()), driver.model
