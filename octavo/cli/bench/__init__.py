"""`octavo bench BENCHMARK`: measures the engine, or any OpenAI-compatible server.

A benchmark is a module of this package with

    SUMMARY: str                                      one line for `octavo bench --help`
    add_arguments(parser: ArgumentParser) -> None     declares its options
    measure(args: Namespace, engines: Engines) -> Report

so that another program can run several of them on one loaded model (benchmarks/gpu.py does).
"""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from octavo.bench.engines import Engines
    from octavo.bench.report import Report

SUMMARY = "measure latency and throughput, offline or of any OpenAI-compatible server"

BENCHMARKS = ("latency", "throughput", "serve", "startup", "sweep", "growth", "scheduler")


class Benchmark(Protocol):
    """What is asked of a benchmark's module."""

    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def measure(self, args: argparse.Namespace, engines: Engines) -> Report: ...


def load_benchmark(name: str) -> Benchmark:
    """Import the module of a benchmark."""
    return cast(Benchmark, importlib.import_module(f"octavo.cli.bench.{name}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True, title="benchmarks")
    for name in BENCHMARKS:
        module = load_benchmark(name)
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        command.add_argument(
            "--json", metavar="FILE", help="Write configuration, all figures and every record."
        )
        command.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")
        module.add_arguments(command)


def run(args: argparse.Namespace) -> int:
    from octavo.bench.engines import Engines
    from octavo.bench.report import check_writable, save

    for name in ("json", "plot"):
        check_writable(getattr(args, name, None), name)
    with Engines() as engines:
        report = load_benchmark(args.benchmark).measure(args, engines)
    print(report.text)
    if args.json:
        save(args.json, report)
    return 1 if report.failed else 0
