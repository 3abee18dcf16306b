"""The server as a process: its port before its model, SIGTERM drains, exit 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from octavo.engine.garbage import keep_for_good
from octavo.errors import ConfigError
from octavo.server.access_log import AccessLog
from octavo.server.api_keys import ApiKeys
from octavo.server.app import LoadingGate, build_app
from octavo.server.config import ServerConfig
from octavo.server.listening import address, bound, cannot_bind
from octavo.server.service import Engine, Service

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT = 5
"""Seconds that connections get to close once every answer has been sent."""

MOST_FILES = 65_535
"""Open files, of which connections are most."""


def serve(create_engine: Callable[[], Awaitable[Engine]], config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    The first signal stops taking requests and lets the running ones finish within
    `config.drain_timeout`; a second one ends them.

    Raises:
        ConfigError: port or path in use, bad settings.
    """
    with bound(config) as sock:
        raise_file_limit()
        return run(_serve(create_engine, config, sock))


def raise_file_limit() -> None:
    """Take as many open files as the system lets us: each connection is one, and processes begin with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(
            OSError, ValueError
        ):  # systems may have another limit, which they don't tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
    keys = ApiKeys(config)
    access_log = None if config.access_log is None else AccessLog(config.access_log)
    if config.api_key_file is not None or access_log is not None:
        # While the model loads, too: a hangup that nobody takes ends a process.
        loop.add_signal_handler(signal.SIGHUP, reload, keys, access_log)
    gate = LoadingGate()
    server = _Server(uvicorn_config(gate, config))
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    starting = asyncio.ensure_future(create_engine())
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        starting.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await asyncio.wait((starting, serving), return_when=asyncio.FIRST_COMPLETED)
    try:
        if serving.done():
            starting.cancel()
        engine = await starting
    except asyncio.CancelledError:
        if not serving.done():
            logger.info("stopped while the model was loading")
        return await _stop(server, serving, config)
    except BaseException:
        await _stop(server, serving, config)
        raise
    try:
        service = Service(engine, config, keys, access_log)
        gate.app = build_app(service)
        keep_for_good()
        shutdown = _Shutdown(service, server)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shutdown.signal)
        if stopping.is_set():  # when the engine was just there, so that nothing was left to cancel
            shutdown.signal()
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            _tell_ready(address(sock, server.config.is_ssl))
        try:
            await serving
        finally:
            service.close()
    finally:
        try:
            await _stop(server, serving, config)
        finally:
            await engine.shutdown(0.0)
    return 0


async def _stop(server: _Server, serving: asyncio.Future[None], config: ServerConfig) -> int:
    """Close the port; the exit code.

    Raises:
        ConfigError: it could not be opened.
    """
    server.should_exit = True
    try:
        await serving
    except OSError as error:
        raise cannot_bind(config, error) from None
    return 0


def reload(keys: ApiKeys, access_log: AccessLog | None) -> None:
    """Read the API keys' file and open the access log again."""
    keys.reload()
    if access_log is not None:
        access_log.reopen()


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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if not sockets or sockets[0].family != socket.AF_UNIX:
            await super().startup(sockets)
            return
        # Uvicorn makes a TCP server of it, whose connections are to send without delay, which these cannot.
        await self.lifespan.startup()
        config = self.config

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_unix_server(protocol, sock=sock, ssl=config.ssl, backlog=config.backlog)
            for sock in sockets
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _tell_ready(where: str) -> None:
    """Write the line that says where requests are taken."""
    line = f"Octavo is ready: {where}"
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk is no reason not to serve
        logger.warning("%s (standard output takes nothing: %s)", line, error.strerror)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (to the end of the process)


def uvicorn_config(app: Any, config: ServerConfig) -> uvicorn.Config:
    """How the server speaks HTTP.

    Raises:
        ConfigError: there is no certificate, or no key to it, where the settings say.
    """
    options: dict[str, Any] = {}
    if config.ssl_certfile or config.ssl_keyfile:
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(config, name)
            if not path or not os.path.isfile(path):
                raise ConfigError(
                    f"{name}={path!r} is not a file: HTTPS needs both a certificate and its key"
                )
            options[name] = path
        _check_certificate(**options)
    return uvicorn.Config(
        app,
        http=http_protocol(),
        ws="none",  # where a library for it is installed, an offer would be taken up
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT,
        timeout_keep_alive=config.timeout_keep_alive,
        **options,
    )


def _check_certificate(ssl_certfile: str, ssl_keyfile: str) -> None:
    """Read both as the server will.

    Raises:
        ConfigError: they are no certificate and its key, or the key has a password, which nobody is asked.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(ssl_certfile, ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"ssl_certfile={ssl_certfile!r} and ssl_keyfile={ssl_keyfile!r} are no certificate with its key "
            f"({error}): give PEM files, the key without a password"
        ) from None


def http_protocol() -> Any:
    """The protocol class for uvicorn."""
    try:
        from octavo.server.http import BoundedHttpProtocol
    except ImportError:  # httptools is not built for every platform; h11 has a bound of its own
        return "h11"
    return BoundedHttpProtocol
