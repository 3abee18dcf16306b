"""`octavo pull`: fetch the default model."""

from __future__ import annotations

import argparse

SUMMARY = "fetch the default model, which commands use when no model is named"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="Show no progress.")
    parser.add_argument(
        "--path", action="store_true", help="Print where the model lies or would lie, and bring nothing."
    )


def run(args: argparse.Namespace) -> int:
    from octavo.models.pull import default_model_path, pull_default

    print(default_model_path() if args.path else pull_default(progress=not args.quiet))
    return 0
