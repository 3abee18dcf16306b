"""Options that several benchmarks share."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.bench.workloads import WorkloadSpec
    from octavo.config import EngineConfig


def add_integers(parser: argparse.ArgumentParser, options: tuple[tuple[str, int | None, str], ...]) -> None:
    """Options that are whole numbers: flag, default, help."""
    for flag, default, text in options:
        text += "" if default is None else f" Default: {default}."
        parser.add_argument(flag, type=int, default=default, metavar="N", help=text)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The settings of the engine that is measured."""
    from octavo.config import EngineConfig
    from octavo.config_options import add_config_arguments

    add_config_arguments(parser, EngineConfig, "engine")


def add_profile(parser: argparse.ArgumentParser) -> None:
    """`--profile DIR` of an offline benchmark."""
    parser.add_argument(
        "--profile",
        metavar="DIR",
        help="Once all is measured, run the same work again under PyTorch's profiler and write a trace and "
        "a page of figures to this folder (see --profiler-max-iterations, --profiler-delay-iterations).",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings, with `--profile`'s folder among them, which is made.

    Raises:
        ConfigError: wrong settings, or a folder that can't be written to.
    """
    from octavo.bench.report import make_folder
    from octavo.config import EngineConfig
    from octavo.config_options import config_from_args

    config: EngineConfig = config_from_args(args, EngineConfig)
    if getattr(args, "profile", None) is not None:
        make_folder(args.profile, "profile")
        config = replace(config, torch_profiler_dir=args.profile)
    return config


def shown(config: EngineConfig) -> dict[str, Any]:
    """The settings for a file of results, without those that are secret."""
    return {spec.name: getattr(config, spec.name) for spec in fields(config) if spec.repr}


def add_workload(parser: argparse.ArgumentParser) -> None:
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
    for flag, what in (("--random-input-len-range", "of a prompt"), ("--random-output-len-range", "to make")):
        group.add_argument(
            flag,
            type=int,
            nargs=2,
            metavar=("LOW", "HIGH"),
            help=f"random: fewest and most tokens {what}, in the place of length and ratio.",
        )


def workload(args: argparse.Namespace, seed: int) -> WorkloadSpec:
    """The workload that the options name.

    Raises:
        ConfigError: a figure that makes no workload.
    """
    from octavo.bench.workloads import WorkloadSpec

    def bounds(name: str) -> tuple[int, int] | None:
        given = getattr(args, name)
        return None if given is None else (given[0], given[1])

    figures: dict[str, Any] = {
        name: getattr(args, name) for name in ("num_prompts", "input_len", "output_len", "prefix_len")
    }
    return WorkloadSpec(
        kind=args.dataset_name or ("custom" if args.dataset_path else "random"),
        **figures,
        range_ratio=args.random_range_ratio,
        input_range=bounds("random_input_len_range"),
        output_range=bounds("random_output_len_range"),
        period=args.period,
        turns=args.turns,
        turn_len=args.turn_len,
        path=args.dataset_path,
        seed=seed,
    )


def add_vocab_size(parser: argparse._ActionsContainer) -> None:
    """`--vocab-size` of a benchmark that can't ask the model."""
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="Random ids are below it. Default: ids 1000 to 30000."
    )


def server_vocab(args: argparse.Namespace) -> tuple[int, int]:
    """The least and largest token id for a server's prompts.

    Raises:
        ConfigError: `--vocab-size` leaves no ids.
    """
    from octavo.bench.workloads import VOCAB, vocab_bounds
    from octavo.errors import ConfigError

    size: int | None = args.vocab_size
    if size is None:
        return VOCAB
    if size < 8:
        raise ConfigError(f"vocab_size={size} is not valid: give at least 8")
    return vocab_bounds(size)


def bar(total: int, title: str, disable: bool) -> Any:
    """A progress bar on standard error."""
    from tqdm import tqdm

    return tqdm(total=total, desc=title, dynamic_ncols=True, disable=disable)
