"""`octavo bench latency | throughput | serve`: measures the engine, or any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.client import HttpClient
    from octavo.bench.serve import RequestRecord, ServeOptions, ServeRun
    from octavo.bench.workloads import WorkItem, WorkloadSpec

SUMMARY = "measure latency and throughput, offline or of any OpenAI-compatible server"

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True, title="benchmarks")
    for name, summary, add in (
        ("latency", "time of one fixed batch, offline", _add_latency),
        ("throughput", "requests and tokens per second of a workload, offline", _add_throughput),
        ("serve", "what clients of a running server see: TTFT, TPOT, ITL, E2EL, goodput", _add_serve),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument(
            "--json", metavar="FILE", help="Write configuration, all figures and a record per request."
        )
        command.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")
        add(command)


def run(args: argparse.Namespace) -> int:
    from octavo.bench.report import check_writable

    check_writable(args.json)
    commands = {"latency": _run_latency, "throughput": _run_throughput, "serve": _run_serve}
    return commands[args.benchmark](args)


# ---- arguments --------------------------------------------------------------------------------------


def _add_latency(parser: argparse.ArgumentParser) -> None:
    from octavo.config import EngineConfig, add_config_arguments

    for flag, default, text in (
        ("--input-len", 32, "Tokens of each prompt."),
        ("--output-len", 128, "Tokens that each request makes."),
        ("--batch-size", 8, "Requests in the batch."),
        ("--num-iters", 10, "Measured iterations."),
        ("--num-iters-warmup", 2, "Iterations before these."),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
    add_config_arguments(parser, EngineConfig, "engine")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    """Options of a workload. Those that stand for one dataset in vLLM have its name as a second one."""
    group = parser.add_argument_group("workload", "The same figures and seed make the same requests.")
    group.add_argument(
        "--dataset-name",
        metavar="NAME",
        help="random, shared-prefix, repetitive, multi-turn or custom (a file). Default: custom with "
        "--dataset-path, else random.",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="JSON lines with prompt, prompt_token_ids, question, turns or messages, and perhaps max_tokens.",
    )
    for flags, default, text in (
        (("--num-prompts",), None, "Requests in all. Default: 64, or all of a file."),
        (("--input-len", "--random-input-len"), 256, "Tokens of a prompt (beside what is shared)."),
        (("--output-len", "--random-output-len", "--custom-output-len"), 64, "Tokens to make."),
        (("--prefix-len", "--random-prefix-len"), 512, "shared-prefix: tokens that all prompts share."),
        (("--period",), 16, "repetitive: tokens of the unit that is repeated."),
        (("--turns",), 4, "multi-turn: requests of a conversation."),
        (("--turn-len",), 32, "multi-turn: new tokens of each turn after the first."),
    ):
        text += f" Default: {default}." if default else ""
        group.add_argument(*flags, type=int, default=default, metavar="N", help=text)
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="random: lengths are uniform within (1 - R) and (1 + R) times these. Default: 0.",
    )


def _workload(args: argparse.Namespace, seed: int) -> WorkloadSpec:
    from octavo.bench.workloads import WorkloadSpec

    return WorkloadSpec(
        kind=args.dataset_name or ("custom" if args.dataset_path else "random"),
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.prefix_len,
        period=args.period,
        turns=args.turns,
        turn_len=args.turn_len,
        path=args.dataset_path,
        seed=seed,
    )


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    from octavo.config import EngineConfig, add_config_arguments

    _add_workload(parser)
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
    add_config_arguments(parser, EngineConfig, "engine")


def _add_serve(parser: argparse.ArgumentParser) -> None:
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
    _add_workload(parser)
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="Folder or GGUF file whose tokenizer turns random ids into text, for chat. Without one, each "
        "id becomes an English word, of about one token.",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="Random ids are below it. Default: ids 1000 to 30000."
    )
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


# ---- runs -------------------------------------------------------------------------------------------


def _run_latency(args: argparse.Namespace) -> int:
    from octavo.bench.latency import LatencyOptions, measure_latency, render_latency, summarize_latency
    from octavo.bench.report import save
    from octavo.config import EngineConfig, config_from_args
    from octavo.llm import LLM

    names = LatencyOptions.__dataclass_fields__
    options = LatencyOptions(**{name: getattr(args, name) for name in names})
    config = config_from_args(args, EngineConfig)
    with LLM(**vars(config)) as llm:
        with _bar(options.num_iters_warmup + options.num_iters, "Iterations", args.disable_tqdm) as bar:
            times = measure_latency(llm, options, config.seed, bar.update)
    summary = summarize_latency(times, options)
    print(render_latency(summary, options))
    if args.json:
        records = [{"latency_ms": t * 1e3} for t in times]
        save(args.json, "latency", {**asdict(options), "engine": vars(config)}, summary, records)
    return 0


def _run_throughput(args: argparse.Namespace) -> int:
    from octavo.config import EngineConfig, config_from_args
    from octavo.sampling_params import SamplingParams

    config = config_from_args(args, EngineConfig)
    spec = _workload(args, config.seed)
    ignore_eos = spec.kind != "custom" if args.ignore_eos is None else args.ignore_eos
    detokenize = not (args.disable_detokenize or config.skip_tokenizer_init)
    params = SamplingParams(
        temperature=args.temperature, ignore_eos=ignore_eos, detokenize=detokenize, seed=None
    )
    if spec.kind == "custom":
        spec.items()  # a wrong file is told before a model is loaded

    from octavo.bench.report import save
    from octavo.bench.throughput import check_fits, measure_throughput, render_throughput
    from octavo.bench.workloads import vocab_bounds
    from octavo.llm import LLM

    with LLM(**vars(config)) as llm:
        items = spec.items(vocab_bounds(llm.facts.vocab_size))
        check_fits(llm, items)
        with _bar(len(items), "Requests", args.disable_tqdm) as bar:
            summary, records = measure_throughput(llm, items, params, lambda done: bar.update(done - bar.n))
    print(render_throughput(summary))
    if args.json:
        sampling = {"temperature": args.temperature, "ignore_eos": ignore_eos, "detokenize": detokenize}
        settings = {"workload": asdict(spec), **sampling, "engine": vars(config)}
        save(args.json, "throughput", settings, summary, records)
    return 0


def _run_serve(args: argparse.Namespace) -> int:
    from octavo.bench.client import HttpClient, Target
    from octavo.bench.report import save
    from octavo.bench.serve import ServeOptions, records_as_json, render_serve, summarize_serve
    from octavo.bench.statistics import parse_goodput
    from octavo.bench.workloads import VOCAB, vocab_bounds

    goodput = parse_goodput(args.goodput, METRIC_NAMES)
    spec = _workload(args, args.seed)
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
    if args.vocab_size is not None and args.vocab_size < 8:
        raise ConfigError(f"vocab_size={args.vocab_size} is not valid: give at least 8")
    items = spec.items(vocab_bounds(args.vocab_size) if args.vocab_size else VOCAB)
    if options.path == PATHS["completions"] and any(item.messages for item in items):
        raise ConfigError(f"{spec.path} holds messages: send them with --endpoint chat")
    run = _drive(client, options, items, args)
    summary = summarize_serve(run, goodput, args.metric_percentiles)
    print(render_serve(summary, args.percentile_metrics, args.metric_percentiles))
    if args.json:
        settings = {"base_url": target.url, **asdict(options), "workload": asdict(spec), "goodput": goodput}
        save(args.json, "serve", settings, summary, records_as_json(run.records))
    return 0 if summary["completed"] else 1


def _drive(
    client: HttpClient, options: ServeOptions, items: list[WorkItem], args: argparse.Namespace
) -> ServeRun:
    import asyncio

    from octavo.bench.serve import Driver
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
        await driver.prepare()
        try:
            with _bar(len(items), "Requests", args.disable_tqdm) as bar:

                def on_done(record: RequestRecord) -> None:
                    nonlocal failed
                    failed += not record.success
                    if failed:
                        bar.set_postfix_str(f"{failed} failed", refresh=False)
                    bar.update()

                return await driver.run(items, on_done)
        finally:
            client.close()

    try:
        import uvloop
    except ImportError:  # not built for every platform
        return asyncio.run(main())
    return uvloop.run(main())


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = {}
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for item in args.header:
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise ConfigError(f"header={item!r} is not valid: write NAME=VALUE")
        headers[name] = value
    return headers


def _bar(total: int, title: str, disable: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=title, dynamic_ncols=True, disable=disable)
