"""A batch run over the fake engine in a process of its own, to be killed.

`python -m tests.server.batch_fake INPUT OUTPUT DELAY [die_after]`: die_after results the engine dies.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from octavo.errors import OctavoError
from octavo.server.batch import BatchCounts, requests_left, run_batch
from octavo.server.batch_output import BatchOutput
from octavo.server.config import ServerConfig
from octavo.server.service import Service
from tests.server.fakes import FakeEngine


async def main(source: str, target: str, delay: str, die_after: str = "0") -> BatchCounts:
    engine, counts = FakeEngine(delay=float(delay)), BatchCounts()

    def on_result() -> None:
        if int(die_after) and counts.answered >= int(die_after):
            engine.dead.set()

    with BatchOutput(Path(target)) as output:
        service = Service(engine, ServerConfig(served_model_name=["m"]))  # type: ignore[arg-type]
        requests = requests_left(Path(source), output, service.config.max_request_bytes, counts)
        await run_batch(service, requests, output, 4, counts, on_result)
    return counts


if __name__ == "__main__":
    try:
        print(asyncio.run(main(*sys.argv[1:])))
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(1)
