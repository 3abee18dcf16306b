"""`octavo serve`: the model over the OpenAI API."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.config_options import add_config_arguments, config_from_args
from octavo.server.config import ServerConfig

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

SUMMARY = "serve a model over the OpenAI API"


class _HelpSpeculative(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from octavo.speculative_config import describe_fields

        print(describe_fields())
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, ServerConfig, "server")
    add_config_arguments(parser, EngineConfig, "engine")
    parser.add_argument(
        "--help-speculative", action=_HelpSpeculative, nargs=0, help="list the fields of --speculative-config"
    )


def run(args: argparse.Namespace) -> int:
    config = config_from_args(args, ServerConfig)
    engine_config = config_from_args(args, EngineConfig)

    from octavo.log import configure_logging
    from octavo.server.lifecycle import serve

    configure_logging()

    async def create_engine() -> AsyncLLM:
        from octavo.async_llm import AsyncLLM

        return await AsyncLLM.create(
            engine_config, restart_engine=config.restart_engine, engine_timeout=config.engine_timeout
        )

    code = serve(create_engine, config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is closed; no wait for threads of libraries, of a stopped download, say
