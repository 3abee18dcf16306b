"""The server as a process: its port before its model, SIGTERM drains, exit 0."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from octavo.errors import ConfigError
from octavo.server.app import build_app
from octavo.server.config import ServerConfig
from octavo.server.service import Engine, Service

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT = 5
"""Seconds that connections get to close once every answer has been sent."""


def bind(config: ServerConfig) -> socket.socket:
    """Take the port, without listening yet: done before the model loads, so that a mistake shows at once.

    Raises:
        ConfigError: the port or the address cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host={config.host!r} is not an address of this machine ({error}): try 127.0.0.1 or 0.0.0.0"
        ) from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_bind(config, error) from None
    return sock


def serve(create_engine: Callable[[], Awaitable[Engine]], config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    The first signal stops taking requests and lets the running ones finish within
    `config.drain_timeout`; a second one ends them.

    Raises:
        ConfigError: port in use, bad settings.
    """
    sock = bind(config)
    try:
        return run(_serve(create_engine, config, sock))
    finally:
        sock.close()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop where it exists, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:  # not built for every platform
        return asyncio.run(main)
    return uvloop.run(main)


async def _serve(
    create_engine: Callable[[], Awaitable[Engine]], config: ServerConfig, sock: socket.socket
) -> int:
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(create_engine())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, starting.cancel)
    try:
        engine = await starting
    except asyncio.CancelledError:
        logger.info("stopped while the model was loading")
        return 0
    service = Service(engine, config)
    server = _Server(_uvicorn_config(service))
    shutdown = _Shutdown(service, server)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.signal)
    try:
        await server.serve(sockets=[sock])
    except OSError as error:
        raise _cannot_bind(config, error) from None
    finally:
        service.text.close()
        await engine.shutdown(0.0)
    return 0


class _Shutdown:
    """Drains on the first signal, ends what runs on the second."""

    def __init__(self, service: Service, server: uvicorn.Server):
        self._service = service
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def signal(self) -> None:
        """A signal has come."""
        if self._task is not None:
            self._hurry.set()
            return
        running = len(self._service.jobs)
        if running:
            logger.info(
                "shutting down: %d running requests get up to %g s to finish (signal again to end them)",
                running,
                self._service.config.drain_timeout,
            )
        else:
            logger.info("shutting down")
        self._task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            await self._service.drain(self._service.config.drain_timeout, self._hurry)
        finally:
            self._server.should_exit = True


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which would end the process by the signal instead of by 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            shown = f"[{host}]" if ":" in host else host
            print(f"Octavo is ready: {scheme}://{shown}:{port}/v1", flush=True)


def _uvicorn_config(service: Service) -> uvicorn.Config:
    config = service.config
    options: dict[str, Any] = {}
    if config.ssl_certfile or config.ssl_keyfile:
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(config, name)
            if not path or not os.path.isfile(path):
                raise ConfigError(
                    f"{name}={path!r} is not a file: HTTPS needs both a certificate and its key"
                )
            options[name] = path
    return uvicorn.Config(
        build_app(service),
        http=_http_protocol(),
        lifespan="off",
        log_config=None,
        log_level="info" if config.access_log else "warning",
        access_log=config.access_log,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT,
        **options,
    )


def _http_protocol() -> Any:
    """The protocol class for uvicorn."""
    try:
        from octavo.server.http import BoundedHttpProtocol
    except ImportError:  # httptools is not built for every platform; h11 has a bound of its own
        return "h11"
    return BoundedHttpProtocol


def _cannot_bind(config: ServerConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port={config.port} is in use: choose another one, or 0 for a free one")
    if error.errno == errno.EACCES:
        return ConfigError(f"port={config.port} needs privileges: choose one of at least 1024")
    return ConfigError(
        f"cannot listen on host={config.host!r}, port={config.port}: {error.strerror or error}"
    )
