"""The engine core's own process: `python -m octavo.engine.process FD`, started by `ProcessClient`."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from octavo.config import EngineConfig
from octavo.engine.cpu_libraries import settle_libraries
from octavo.engine.frames import receive_frame, send_frame
from octavo.engine.garbage import keep_for_good
from octavo.log import configure_logging
from octavo.messages import AskPulse, CoreOutputs, Fatal, FromCore, Pulse, Ready, Shutdown, ToCore

if TYPE_CHECKING:
    from octavo.engine.cores import Core

logger = logging.getLogger(__name__)
_EXIT_SECONDS = 5.0  # how long a step may still run once the front end is gone


def main(fd: int, make: Callable[[EngineConfig], Core] | None = None) -> int:
    """Load the model that the front end names, serve it over the socket, end when it closes.

    Args:
        make: makes the core; None: as the model needs.
    """
    # The front end decides what they mean; a service manager sends them to all processes of a service.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromCore) -> None:
        send_frame(sock, encoder.encode(message))

    first = receive_frame(sock)
    if first is None:
        return 0
    inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
    outbox: queue.SimpleQueue[CoreOutputs | Pulse | None] = queue.SimpleQueue()
    core: Core | None = None

    def tell_pulse() -> None:
        if core is not None:
            outbox.put(core.pulse.pulse())

    # From here on: it ends a load that nobody awaits.
    threading.Thread(target=_read, args=(sock, inbox, tell_pulse), daemon=True).start()
    try:
        configure_logging()
        settle_libraries()
        from octavo.engine.cores import make_core
        from octavo.engine.loop import run_core

        core = (make or make_core)(EngineConfig(**msgspec.msgpack.decode(first)))
        keep_for_good()
    except Exception as error:
        logger.debug("start failed", exc_info=True)
        send(Fatal(type(error).__name__, str(error)))
        return 1
    send(Ready(core.facts))
    writer = threading.Thread(target=_write, args=(send, outbox), daemon=True)
    writer.start()
    code, last = 0, None
    try:
        run_core(core, inbox, outbox.put)
    except Exception as error:
        logger.exception("the engine core cannot go on")
        code, last = 1, Fatal(type(error).__name__, str(error))
    outbox.put(None)
    writer.join(timeout=_EXIT_SECONDS)
    if last is not None:
        send(last)
    return code


def _read(sock: socket.socket, inbox: queue.SimpleQueue[ToCore], tell_pulse: Callable[[], None]) -> None:
    decoder = msgspec.msgpack.Decoder(ToCore)
    # A front end that was killed with messages unread resets the connection instead of closing it.
    with contextlib.suppress(OSError):
        while (frame := receive_frame(sock)) is not None:
            message = decoder.decode(frame)
            if isinstance(message, AskPulse):  # the loop may be what doesn't answer
                tell_pulse()
            else:
                inbox.put(message)
    inbox.put(Shutdown())
    threading.Timer(_EXIT_SECONDS, os._exit, args=(1,)).start()


def _write(send, outbox: queue.SimpleQueue[CoreOutputs | Pulse | None]) -> None:  # type: ignore[no-untyped-def]
    while (message := outbox.get()) is not None:
        try:
            send(message)
        except OSError:  # the front end is gone; the reader notices too
            return


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no wait for libraries' threads: everything is freed with the process
