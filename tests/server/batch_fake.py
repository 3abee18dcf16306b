"""A batch run over the fake engine in a process of its own, to be killed.

`python -m tests.server.batch_fake INPUT OUTPUT DELAY [die_after]`: die_after results the engine dies.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from octavo.errors import OctavoError
from octavo.server.batch import BatchCounts, run_batch
from octavo.server.batch_output import BatchOutput
from octavo.server.config import ServerConfig
from octavo.server.service import Service
from tests.server.fakes import FakeEngine


async def main(source: str, target: str, delay: str, die_after: str = "0") -> BatchCounts:
    engine = FakeEngine(delay=float(delay))

    def on_result(counts: BatchCounts) -> None:
        if int(die_after) and counts.answered >= int(die_after):
            engine.dead.set()

    with BatchOutput(Path(target)) as output:
        service = Service(engine, ServerConfig(served_model_name=["m"]))  # type: ignore[arg-type]
        return await run_batch(service, Path(source), output, 4, on_result)


if __name__ == "__main__":
    try:
        print(asyncio.run(main(*sys.argv[1:])))
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(1)
