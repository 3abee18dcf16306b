"""`octavo chat`: a conversation in the terminal, or of lines from a pipe."""

from __future__ import annotations

import argparse
import os
import sys

SUMMARY = "chat with a model in the terminal"

MAX_TOKENS = 1024
"""An answer that goes on and on ends by itself; `/set max_tokens` changes it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from octavo.cli.sampling_args import add_sampling_arguments
    from octavo.config import EngineConfig
    from octavo.config_options import add_config_arguments

    parser.add_argument("--system", metavar="TEXT", help="A system message at the conversation's beginning.")
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Tell token counts and rates after each answer. Default: yes.",
    )
    # One --seed, declared with the sampling options, seeds the answers and the engine.
    add_sampling_arguments(parser, max_tokens=MAX_TOKENS)
    add_config_arguments(parser, EngineConfig, "engine", skip=("seed",))


def run(args: argparse.Namespace) -> int:
    from octavo.cli.chat_session import ChatSession, check_settings
    from octavo.cli.sampling_args import sampling_values
    from octavo.cli.terminal import Terminal
    from octavo.config import EngineConfig
    from octavo.config_options import config_from_args

    # Everything that can be wrong with the command line is told before a model is loaded.
    values, defaults = sampling_values(args), {"max_tokens": MAX_TOKENS}
    check_settings({**defaults, **values})
    config = config_from_args(args, EngineConfig)

    from octavo.llm import LLM

    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr, os.environ)
    with terminal, LLM(**vars(config)) as llm:
        session = ChatSession(llm, terminal, values, defaults, args.system, args.stats)
        session.greet()
        session.run()
    return 0
