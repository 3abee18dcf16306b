"""A server process over the fake engine, for the tests of signals and disconnects.

`python -m tests.server.serve_fake PORT DELAY DRAIN_TIMEOUT [slow | late]`; slow: the model never finishes
loading; late: it is loaded at the very moment at which a SIGTERM comes.
Further settings of the server, as JSON, in the variable SERVE_FAKE.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from octavo.errors import OctavoError
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import serve
from tests.server.fakes import FakeEngine


def main(port: str, delay: str, drain_timeout: str, *extra: str) -> int:
    engines = []

    async def create() -> FakeEngine:
        print("loading", flush=True)
        if extra == ("slow",):
            await asyncio.sleep(60)
        engines.append(FakeEngine(delay=float(delay)))
        if extra == ("late",):
            os.kill(os.getpid(), signal.SIGTERM)
        return engines[0]

    try:
        more = json.loads(os.environ.get("SERVE_FAKE", "{}"))
        config = ServerConfig(port=int(port), drain_timeout=float(drain_timeout), **more)
        code = serve(create, config)  # type: ignore[arg-type]
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 2
    print("engine down" if engines and engines[0].down else "no engine", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
