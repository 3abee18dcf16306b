"""A running server over a fake engine, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from octavo.server.access_log import AccessLog
from octavo.server.app import build_app
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import uvicorn_config
from octavo.server.service import Service
from tests.server.fakes import FakeEngine


@dataclass
class Running:
    """A server on a free port of this machine."""

    url: str
    port: int
    service: Service
    engine: FakeEngine
    client: httpx.Client
    loop: asyncio.AbstractEventLoop

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)


@contextlib.contextmanager
def running(engine: FakeEngine | None = None, **settings: Any) -> Iterator[Running]:
    engine = engine or FakeEngine()
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    config = ServerConfig(**settings)
    log = None if config.access_log is None else AccessLog(config.access_log)
    service = Service(engine, config, access_log=log)
    server = uvicorn.Server(uvicorn_config(build_app(service), config))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(server.serve(sockets=[sock])), daemon=True
    )
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
            for _ in range(500):
                if server.started:
                    break
                threading.Event().wait(0.01)
            yield Running(url, port, service, engine, client, loop)
    finally:
        server.should_exit = True
        thread.join(10)
        service.close()
        loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server
