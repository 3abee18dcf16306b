"""How a front end reaches an engine core: on a thread of this process, or in a process beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import select
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.child import start_child
from octavo.engine.cpu_libraries import settle_libraries
from octavo.engine.frames import receive_frame
from octavo.engine.sender import FrameSender
from octavo.engine.watchdog import Watch, Watchdog
from octavo.errors import EngineDeadError, OctavoError
from octavo.messages import AskPulse, CoreOutputs, Fatal, FromCore, Pulse, Ready, Shutdown, ToCore
from octavo.step_messages import ModelFacts

logger = logging.getLogger(__name__)

_START_POLL = 0.1  # seconds between looks at whether the start has been given up
_KILL_SECONDS = 10.0  # that a killed process gets to be gone

OnOutputs = Callable[[CoreOutputs], None]
OnDeath = Callable[[EngineDeadError], None]


class CoreClient(ABC):
    """A running engine core, seen from a front end.

    `on_outputs` and `on_death` are called on a thread of the client's.

    Raises (on construction):
        OctavoError: the core could not start.
    """

    facts: ModelFacts

    @abstractmethod
    def send(self, message: ToCore) -> None:
        """Pass a message on; returns at once.

        Raises:
            EngineDeadError: nobody is there to take it.
        """

    @abstractmethod
    def close(self) -> None:
        """Shut the core down and wait until it has freed everything."""


class ThreadClient(CoreClient):
    """The core on a thread of this process: for `LLM`, where one process is enough."""

    def __init__(self, config: EngineConfig, on_outputs: OnOutputs, on_death: OnDeath):
        self._inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[ModelFacts | BaseException] = queue.SimpleQueue()
        self._dead: EngineDeadError | None = None
        self._thread = threading.Thread(
            target=self._run, args=(config, on_outputs, on_death), name="octavo-core", daemon=True
        )
        self._thread.start()
        outcome = self._started.get()
        if isinstance(outcome, BaseException):
            self._thread.join()
            raise outcome
        self.facts = outcome

    def send(self, message: ToCore) -> None:
        if self._dead is not None:
            raise self._dead
        self._inbox.put(message)

    def close(self) -> None:
        self._inbox.put(Shutdown())
        self._thread.join()

    def _run(self, config: EngineConfig, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        try:
            settle_libraries()
            from octavo.engine.cores import make_core  # loads the workers' libraries
            from octavo.engine.loop import run_core

            core = make_core(config)
        except BaseException as error:
            self._started.put(error)
            return
        self._started.put(core.facts)
        try:
            run_core(core, self._inbox, on_outputs)
        except Exception as error:
            self._dead = (
                error if isinstance(error, EngineDeadError) else EngineDeadError(f"engine core: {error}")
            )
            on_death(self._dead)


class ProcessClient(CoreClient):
    """The core in a process of its own: for the server, so that neither waits for the other's Python.

    They share one socket pair and nothing else: no port, no name, no file. Either side's end closes
    it, which the other notices at once.

    Args:
        abandoned: set, while the core loads, to give the start up.
        module: what is run as that process, with its arguments; the socket's number comes after them.
        watch: ends the process if it hangs; None: it may take any time.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: OnOutputs,
        on_death: OnDeath,
        abandoned: threading.Event | None = None,
        module: Sequence[str] = ("octavo.engine.process",),
        watch: Watch | None = None,
    ):
        self._process, self._socket = start_child(module)
        self._sender = FrameSender(self._socket)
        self._closing = False
        self._dead: EngineDeadError | None = None
        self._hung: str | None = None  # why the process was ended
        self._watchdog: Watchdog | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        try:
            self._sender.send(self._encoder.encode(dataclasses.asdict(config)))
            while not select.select([self._socket], [], [], _START_POLL)[0]:
                if abandoned is not None and abandoned.is_set():
                    raise EngineDeadError("the engine's start was given up")
            first = self._receive()
        except BaseException:
            self._kill()
            raise
        if not isinstance(first, Ready):
            self._kill()
            kind = getattr(errors, first.kind, OctavoError) if isinstance(first, Fatal) else EngineDeadError
            message = first.message if isinstance(first, Fatal) else "the engine core ended while starting"
            raise kind(message)
        self.facts = first.facts
        if watch is not None:
            self._watchdog = Watchdog(watch, self._ask_pulse, self._end_hung)
        self._thread = threading.Thread(
            target=self._listen, args=(on_outputs, on_death), name="octavo-core-reader"
        )
        self._thread.daemon = True
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    def send(self, message: ToCore) -> None:
        if self._dead is not None:
            raise self._dead
        data = self._encoder.encode(message)
        try:
            self._sender.send(data)
        except OSError as error:
            raise EngineDeadError("the engine core has ended") from error

    def close(self) -> None:
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.close()
        with contextlib.suppress(EngineDeadError):
            self.send(Shutdown())
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join(timeout=5)
        self._kill()

    def _kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(timeout=_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("the engine core's process %d is stuck in the kernel and cannot be ended", self.pid)
        self._socket.close()

    def _ask_pulse(self) -> None:
        with contextlib.suppress(EngineDeadError):
            self.send(AskPulse())

    def _end_hung(self, what: str) -> None:
        """The core has hung: end its process, which the reader notices and tells."""
        self._hung = what
        logger.error("the engine core hangs: %s; its process is ended", what)
        self._process.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a process stuck in the kernel would keep it open

    def _receive(self) -> FromCore | None:
        frame = receive_frame(self._socket)
        return None if frame is None else self._decoder.decode(frame)

    def _listen(self, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        message: FromCore | None = None
        reason: str | None = None
        try:
            while isinstance(message := self._receive(), CoreOutputs | Pulse):
                if isinstance(message, CoreOutputs):
                    on_outputs(message)
                elif self._watchdog is not None:
                    self._watchdog.tell(message)
        except OSError:
            pass
        except Exception as error:  # nobody would be told anything from here on
            logger.exception("the engine core's news cannot be taken in")
            reason = f"its news cannot be taken in: {error}"
            self._process.kill()
        if self._closing:
            return
        if self._watchdog is not None:
            self._watchdog.close()
        if self._hung is not None:
            reason = f"it hung: {self._hung}"
        elif reason is None:
            reason = message.message if isinstance(message, Fatal) else f"exit code {self._process.wait()}"
        self._dead = EngineDeadError(f"the engine core has ended ({reason})")
        on_death(self._dead)
