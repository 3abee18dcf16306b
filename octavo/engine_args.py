"""vLLM's ways to say settings and to start an engine, for programs that are written so."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.config import EngineConfig, make_config
from octavo.config_options import add_config_arguments, config_from_args


class EngineArgs(EngineConfig):
    """The settings of an engine: `LLM(**dataclasses.asdict(args))`, `AsyncLLM.from_engine_args(args)`.

    Raises:
        ConfigError: a setting that is wrong, or not known.
    """

    def __init__(self, model: str | None = None, **settings: Any):
        super().__init__(**vars(make_config(EngineConfig, {"model": model, **settings})))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a parser the options of all settings."""
        add_config_arguments(parser, EngineConfig, "engine")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The settings that such a parser has read."""
        return cls(**vars(config_from_args(args, EngineConfig)))


class AsyncEngineArgs(EngineArgs):
    """The same, by the name that asynchronous programs use."""
