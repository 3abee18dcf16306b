"""`octavo bench serve`: what clients of a running server see."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.cli.bench.options import add_vocab_size, add_workload, bar, server_vocab, workload
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.client import HttpClient
    from octavo.bench.engines import Engines
    from octavo.bench.report import Report
    from octavo.bench.serve import RequestRecord, ServeOptions, ServeRun
    from octavo.bench.workloads import WorkItem

SUMMARY = "what clients of a running server see: TTFT, TPOT, ITL, E2EL, goodput"

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")


def _add_server(parser: argparse.ArgumentParser) -> Any:
    """Options that say where the server is; returns their group."""
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="Default: http://127.0.0.1:8000.")
    server.add_argument("--host", default="127.0.0.1", help="Without --base-url. Default: 127.0.0.1.")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="Default: 8000.")
    server.add_argument(
        "--endpoint",
        type=_endpoint,
        default=PATHS["completions"],
        metavar="NAME",
        help="completions or chat (or their paths). Default: completions.",
    )
    server.add_argument("--model", metavar="NAME", help="Default: the first that /v1/models tells.")
    server.add_argument("--api-key", metavar="KEY", help="Default: OPENAI_API_KEY of the environment.")
    server.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="A header of every request."
    )
    server.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=600.0,
        metavar="S",
        help="How long to wait until the server is there. Default: 600.",
    )
    server.add_argument(
        "--request-timeout", type=float, default=3600.0, metavar="S", help="Of a whole answer. Default: 3600."
    )
    return server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = _add_server(parser)
    server.add_argument(
        "--profile",
        action="store_true",
        help="Let the server record the run's first steps: it must run with --torch-profiler-dir.",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="Requests started a second, with random (Poisson) gaps. Default: inf, all at once.",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="Shape of the gaps' gamma distribution: 1 is Poisson, less is burstier. Default: 1.",
    )
    load.add_argument(
        "--max-concurrency", type=int, metavar="N", help="Most requests at once. Default: no limit."
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="Of requests and gaps. Default: 0.")
    add_workload(parser)
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="Folder or GGUF file whose tokenizer turns random ids into text, for chat. Without one, each "
        "id becomes an English word, of about one token.",
    )
    add_vocab_size(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy. Default: 0."
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="Ask for the full length (a field of vLLM's and Octavo's)."
    )
    sampling.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="Further fields of every request."
    )
    report = parser.add_argument_group("report")
    report.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=list(METRIC_NAMES),
        metavar="LIST",
        help="Metrics to show. Default: ttft,tpot,itl,e2el.",
    )
    report.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=[90.0, 99.0],
        metavar="LIST",
        help="Percentiles to show. Default: 90,99.",
    )
    report.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="Count requests within all of these, for example ttft:500 tpot:50.",
    )


def _endpoint(text: str) -> str:
    if text in PATHS:
        return PATHS[text]
    if text in PATHS.values():
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not known: choose completions or chat")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRIC_NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is not known: choose from {', '.join(METRIC_NAMES)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(item) for item in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 to 100")
    return values


def measure(args: argparse.Namespace, engines: Engines) -> Report:
    from octavo.bench.client import HttpClient, Target
    from octavo.bench.report import Report
    from octavo.bench.serve import ServeOptions, records_as_json, render_serve, summarize_serve
    from octavo.bench.statistics import parse_goodput

    goodput = parse_goodput(args.goodput, METRIC_NAMES)
    spec = workload(args, args.seed)
    options = ServeOptions(
        path=args.endpoint,
        model=args.model,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        extra_body=args.extra_body,
        seed=args.seed,
        ready_timeout=args.ready_check_timeout_sec,
    )
    target = Target.parse(args.base_url or f"http://{args.host}:{args.port}")
    client = HttpClient(target, _headers(args), args.request_timeout)
    items = spec.items(server_vocab(args))
    if options.path == PATHS["completions"] and any(item.messages for item in items):
        raise ConfigError(f"{spec.path} holds messages: send them with --endpoint chat")
    run = _drive(client, options, items, args)
    summary = summarize_serve(run, goodput, args.metric_percentiles)
    settings = {"base_url": target.url, **asdict(options), "workload": asdict(spec), "goodput": goodput}
    text = render_serve(summary, args.percentile_metrics, args.metric_percentiles)
    report = Report(
        "serve", settings, summary, records_as_json(run.records), text, failed=not summary["completed"]
    )
    return report.marked(run.synthetic)


def _drive(
    client: HttpClient, options: ServeOptions, items: list[WorkItem], args: argparse.Namespace
) -> ServeRun:
    from octavo.bench.client import RequestFailed
    from octavo.bench.serve import Driver, run_async
    from octavo.bench.words import WordText

    to_text: Any = WordText()
    if args.tokenizer:
        from octavo.tokenization.tokenizer import load_tokenizer

        to_text = load_tokenizer(args.tokenizer).decode
    driver = Driver(client, options, to_text)
    if options.path == PATHS["chat"] and not args.tokenizer and any(i.prompt_token_ids for i in items):
        driver.notes.append("prompts are English words: their tokens are about as many (see --tokenizer)")

    async def main() -> ServeRun:
        failed = 0
        try:
            await driver.prepare()
            if args.profile:
                await driver.start_profile()
            with bar(len(items), "Requests", args.disable_tqdm) as progress:

                def on_done(record: RequestRecord) -> None:
                    nonlocal failed
                    failed += not record.success
                    if failed:
                        progress.set_postfix_str(f"{failed} failed", refresh=False)
                    progress.update()

                run = await driver.run(items, on_done)
            if args.profile:
                try:
                    run.profile = await driver.stop_profile()
                except RequestFailed as error:  # the figures are there all the same
                    run.notes.append(f"no profile: {error}")
            return run
        finally:
            client.close()

    return run_async(main())


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries an API key: this one, or the environment's."""
    key = key or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = authorization(args.api_key)
    for item in args.header:
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise ConfigError(f"header={item!r} is not valid: write NAME=VALUE")
        headers[name] = value
    return headers
