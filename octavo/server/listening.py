"""Where requests are taken: a port, or a socket of the file system."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig

_PROBE_SECONDS = 2.0


@contextlib.contextmanager
def bound(config: ServerConfig) -> Iterator[socket.socket]:
    """The socket, which listens: before the model loads, so that a mistake shows at once.

    Raises:
        ConfigError: the port, the address or the path cannot be had.
    """
    sock = _bind_port(config) if config.uds is None else _bind_path(config, config.uds)
    own = _file(config.uds)
    try:
        yield sock
    finally:
        sock.close()
        if config.uds is not None and own is not None and _file(config.uds) == own:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def address(sock: socket.socket, is_ssl: bool) -> str:
    """Where a socket is reached, as people are told."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_ssl else 'http'}://{shown}:{port}/v1"


def cannot_bind(config: ServerConfig, error: OSError) -> ConfigError:
    """Why no requests can be taken there, and what to do."""
    if config.uds is not None:
        return ConfigError(f"cannot listen on uds={config.uds!r}: {error.strerror or error}")
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port={config.port} is in use: choose another one, or 0 for a free one")
    if error.errno == errno.EACCES:
        return ConfigError(f"port={config.port} needs privileges: choose one of at least 1024")
    return ConfigError(
        f"cannot listen on host={config.host!r}, port={config.port}: {error.strerror or error}"
    )


def _bind_port(config: ServerConfig) -> socket.socket:
    try:
        family, kind, proto, _, place = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host={config.host!r} is not an address of this machine ({error}): try 127.0.0.1 or 0.0.0.0"
        ) from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen()  # two may bind a port of which one may listen, and uvloop would pass over that
    except OSError as error:
        sock.close()
        raise cannot_bind(config, error) from None
    return sock


def _bind_path(config: ServerConfig, path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left(path)
        sock.bind(path)
        sock.listen()  # at once: another server would take a socket without a listener for one that was left
    except OSError as error:
        sock.close()
        raise cannot_bind(config, error) from None
    except ConfigError:
        sock.close()
        raise
    return sock


def _remove_left(path: str) -> None:
    """Remove the socket of a server that was killed.

    Raises:
        ConfigError: something else is there, or a server that lives.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds={path!r} is there already and is no socket: name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except TimeoutError:  # it has more to do than it can
            raise ConfigError(f"uds={path!r} is in use by another server: name another path") from None
        else:
            raise ConfigError(f"uds={path!r} is in use by another server: name another path")


def _file(path: str | None) -> tuple[int, int] | None:
    """What tells a file from another one of the same name; None if there is none."""
    try:
        found = os.lstat(path or "")
    except OSError:
        return None
    return found.st_dev, found.st_ino
