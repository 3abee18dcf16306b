"""`octavo eval`: perplexity on a text, and the divergence from a baseline."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config import EngineConfig

SUMMARY = "measure perplexity on a text, and how far a model or setting is from a baseline"

# Where and with how much is computed, not what: of the model's settings the baseline takes these over.
SHARED = ("device", "num_threads", "download_dir", "hf_token", "seed", "max_num_batched_tokens")
# And these, if only its settings differ.
SAME_MODEL = ("model", "revision", "tokenizer", "tokenizer_revision")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from octavo.config import EngineConfig
    from octavo.config_options import add_config_arguments, token_count

    parser.add_argument(
        "--text",
        required=True,
        metavar="FILE",
        help='UTF-8 text, or JSON lines with "text" (.jsonl): each is evaluated by itself.',
    )
    parser.add_argument(
        "--baseline",
        metavar="MODEL",
        help="What to compare with, in the same forms as the model. Default with --baseline-args: the model "
        "itself.",
    )
    parser.add_argument(
        "--baseline-args",
        metavar="ARGS",
        help="Engine settings of the baseline, as one word: --baseline-args='--dtype float32'. It takes over "
        + ", ".join(SHARED)
        + " of the model's; all others are the defaults.",
    )
    parser.add_argument(
        "--window",
        type=token_count,
        default=512,
        metavar="N",
        help="Tokens of a window, each computed by itself. Default: 512.",
    )
    parser.add_argument(
        "--stride",
        type=token_count,
        metavar="N",
        help="Tokens that each window scores; the rest of it is context. Default: as many as can be.",
    )
    parser.add_argument(
        "--max-tokens", type=token_count, metavar="N", help="Most tokens to score. Default: all."
    )
    parser.add_argument(
        "--max-ppl-rise",
        type=_share,
        metavar="SHARE",
        help="Exit with 1 if perplexity is higher than the baseline's by more (0.5%% or 0.005).",
    )
    parser.add_argument(
        "--max-kl", type=_nats, metavar="NATS", help="Exit with 1 if the mean divergence is larger."
    )
    parser.add_argument(
        "--min-agreement",
        type=_share,
        metavar="SHARE",
        help="Exit with 1 if the likeliest token is the same at a smaller share of positions (99%%).",
    )
    parser.add_argument("--json", metavar="FILE", help="Write settings, all figures and a record per window.")
    parser.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")
    add_config_arguments(parser, EngineConfig, "engine")


def run(args: argparse.Namespace) -> int:
    from octavo.bench.report import check_writable, save
    from octavo.config import EngineConfig
    from octavo.config_options import config_from_args
    from octavo.engine.cpu_libraries import settle_libraries
    from octavo.eval.texts import read_texts
    from octavo.eval.thresholds import Thresholds

    # Everything that can be wrong with the command line is told before a model is loaded.
    check_writable(args.json)
    config = config_from_args(args, EngineConfig)
    baseline = baseline_config(args, config)
    thresholds = Thresholds(args.max_ppl_rise, args.max_kl, args.min_agreement)
    if thresholds.given and baseline is None:
        option = next(iter(thresholds.given)).replace("_", "-")
        raise ConfigError(f"--{option} compares with a baseline: give --baseline or --baseline-args")
    file = read_texts(args.text)

    settle_libraries()
    from tqdm import tqdm

    from octavo.eval.evaluate import EvalOptions, evaluate
    from octavo.eval.report import make_report

    options = EvalOptions(args.window, args.stride, args.max_tokens)
    with tqdm(desc="Tokens", unit="tok", dynamic_ncols=True, disable=args.disable_tqdm) as bar:

        def show(tokens: int, perplexity: float) -> None:
            bar.set_postfix_str(f"perplexity {perplexity:.4g}", refresh=False)
            bar.update(tokens - bar.n)

        evaluation = evaluate(config, file.texts, options, baseline, bar.reset, show)
    report = make_report(evaluation, file, thresholds)
    print(report.text)
    if args.json:
        save(args.json, report)
    return 1 if report.failed else 0


def baseline_config(args: argparse.Namespace, config: EngineConfig) -> EngineConfig | None:
    """The baseline's settings, or None where nothing is compared.

    Raises:
        ConfigError: `--baseline-args` is wrong.
    """
    if args.baseline is None and args.baseline_args is None:
        return None
    from octavo.config import EngineConfig
    from octavo.config_options import add_config_arguments, config_from_args

    parser = _BaselineParser(add_help=False, allow_abbrev=False)
    add_config_arguments(parser, EngineConfig, "engine", skip=("model",))
    try:
        words = shlex.split(args.baseline_args or "")
    except ValueError as error:
        raise ConfigError(f"baseline-args={args.baseline_args!r} cannot be split: {error}") from None
    taken = SHARED if args.baseline is not None else (*SHARED, *SAME_MODEL)
    defaults: dict[str, Any] = {name: getattr(config, name) for name in taken}
    if args.baseline is not None:
        defaults["model"] = args.baseline
    return config_from_args(parser.parse_args(words), EngineConfig, **defaults)


class _BaselineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"baseline-args: {message}")


def _share(text: str) -> float:
    from octavo.eval.thresholds import parse_share

    try:
        return parse_share(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _nats(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of nats: write for example 0.01")
    return value
