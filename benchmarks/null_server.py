"""`octavo serve` without a model: every token is there at once, or after `--step-ms`.

All else is real: HTTP, chat templates, tokenizer, the engine's process with its scheduler, detokenizer.

    python -m benchmarks.null_server MODEL [--step-ms 0] [OPTIONS of octavo serve]
"""

from __future__ import annotations

import argparse
import sys

from octavo.async_llm import AsyncLLM
from octavo.bench.null_engine import NullLLM
from octavo.cli.serve import add_arguments
from octavo.config import EngineConfig, config_from_args
from octavo.errors import OctavoError
from octavo.log import configure_logging
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import serve


def main() -> int:
    parser = argparse.ArgumentParser(description="A server without a model.")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what a step takes at least")
    add_arguments(parser)
    args = parser.parse_args()
    config, engine_config = config_from_args(args, ServerConfig), config_from_args(args, EngineConfig)
    configure_logging()

    async def create_engine() -> AsyncLLM:
        import asyncio

        loop = asyncio.get_running_loop()
        return await asyncio.to_thread(NullLLM, engine_config, loop, step_seconds=args.step_ms / 1e3)

    try:
        return serve(create_engine, config)
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
