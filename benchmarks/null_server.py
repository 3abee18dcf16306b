"""`octavo serve` without a model: every token is there at once, or after `--step-ms`.

All else is real: HTTP, chat templates, tokenizer, the engine's process with its scheduler, detokenizer.
With `--times FILE` it writes at its end, as JSON, when each request reached the engine's front end, and when
its first token left the engine (`time.time()`, seconds; by the request's id).

    python -m benchmarks.null_server MODEL [--step-ms 0] [--times FILE] [OPTIONS of octavo serve]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from octavo.async_llm import AsyncLLM
from octavo.bench.null_engine import NullLLM
from octavo.cli.serve import add_arguments
from octavo.config import EngineConfig
from octavo.config_options import config_from_args
from octavo.errors import OctavoError
from octavo.log import configure_logging
from octavo.outputs import RequestOutput
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import serve


class _TimedLLM(NullLLM):
    """Notes the times of every request."""

    times: dict[str, tuple[float, float]] = {}

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        async for out in super().generate(*args, **kwargs):
            if out.request_id not in self.times:
                self.times[out.request_id] = (out.metrics.arrival_time, out.metrics.first_token_time)
            yield out


def main() -> int:
    parser = argparse.ArgumentParser(description="A server without a model.")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what a step takes at least")
    parser.add_argument("--times", help="file for the times of all requests")
    add_arguments(parser)
    args = parser.parse_args()
    config, engine_config = config_from_args(args, ServerConfig), config_from_args(args, EngineConfig)
    configure_logging()

    async def create_engine() -> AsyncLLM:
        import asyncio

        loop = asyncio.get_running_loop()
        kind = _TimedLLM if args.times else NullLLM
        return await asyncio.to_thread(kind, engine_config, loop, step_seconds=args.step_ms / 1e3)

    try:
        code = serve(create_engine, config)
        if args.times:
            Path(args.times).write_text(json.dumps(_TimedLLM.times))
        return code
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
