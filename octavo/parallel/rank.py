"""One rank's process: `python -m octavo.parallel.rank FD`, started by the engine's `RanksExecutor`.

It runs the ordinary `Worker` on the plans that come over its socket, and ends when the socket does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import zlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.engine.cpu_libraries import settle_libraries
from octavo.engine.frames import receive_frame, send_frame
from octavo.engine.garbage import keep_for_good
from octavo.engine.trace_summary import STAGES, STEP
from octavo.log import configure_logging
from octavo.parallel.wire import (
    Answer,
    Beat,
    CloseRank,
    DrawTokens,
    FromRank,
    RankFatal,
    RankReady,
    RankSetup,
    RunStep,
    SleepRank,
    StartTrace,
    StepDone,
    StepFailed,
    StopTrace,
    ToRank,
    WakeRank,
    decode_setup,
    decode_to_rank,
    encode,
)

if TYPE_CHECKING:
    from octavo.engine.executor import PendingStep
    from octavo.step_messages import StepResult
    from octavo.worker.profiler import TorchProfiler
    from octavo.worker.worker import Worker

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
_, _EXECUTE, _WAIT, _ = STAGES
_PR_SET_PDEATHSIG = 1


class Link:
    """This rank's end of the socket: whole messages, from any thread."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._lock = threading.Lock()

    def receive(self) -> bytearray | None:
        """The next message; None: the engine has gone."""
        # An engine that was killed with messages unread resets the connection instead of closing it.
        with contextlib.suppress(OSError):
            return receive_frame(self._socket)
        return None

    def send(self, message: FromRank) -> None:
        """Tell the engine; of no effect once it has gone, which the reader sees to."""
        data = encode(message)
        with self._lock, contextlib.suppress(OSError):
            send_frame(self._socket, data)


def main(fd: int) -> int:
    """Join the other ranks, load this one's part, serve steps. Returns the exit code."""
    # The front end decides what they mean; a service manager sends them to all processes of a service.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    link = Link(socket.socket(fileno=fd))
    first = link.receive()
    if first is None:
        return 0
    setup = decode_setup(first)
    inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(link, inbox), daemon=True).start()
    threading.Thread(target=_beat, args=(link,), daemon=True).start()
    try:
        configure_logging(setup.log_level, f"rank {setup.rank}: ")
        settle_libraries()
        worker = _load(setup)
        keep_for_good()
    except Exception as error:
        logger.debug("start failed", exc_info=True)
        link.send(RankFatal(type(error).__name__, str(error)))
        return 1
    link.send(RankReady(worker.facts))
    try:
        _Server(worker, link, setup.rank, tells=setup.rank == setup.tensor * (setup.pipeline - 1)).run(inbox)
    except Exception as error:
        logger.error("rank %d cannot go on", setup.rank, exc_info=True)
        link.send(RankFatal(type(error).__name__, str(error)))
        return 1
    return 0


def _load(setup: RankSetup) -> Worker:
    """Meet the other ranks and load this one's part of the model."""
    config = EngineConfig(**setup.config)
    from octavo.worker.kernel_compiler import start_compiler

    # One compiles for all; it ends with this process. Stages have other kernels, and go without.
    compiler = start_compiler(config) if setup.rank == 0 and setup.pipeline == 1 else None
    from octavo.parallel.process_group import choose_rank_device, join_ranks  # from here on with PyTorch
    from octavo.parallel.process_stages import join_stages
    from octavo.worker.worker import Worker

    device = choose_rank_device(config.device, setup.rank, config.num_ranks)
    sizes, seconds = (setup.rank, setup.tensor, setup.pipeline), config.distributed_timeout_seconds
    ranks = join_ranks(*sizes, setup.rendezvous, device, seconds)
    stages = join_stages(*sizes, device, seconds)
    few_rows = not config.disable_custom_all_reduce
    ranks.tensor.join_peers(device, few_rows=few_rows, any_rows=config.batch_invariant)
    return Worker(config, compiler, group=ranks.tensor, stages=stages)


class _Server:
    """Runs what the engine asks for, in order. On a device that works beside the host, results are waited
    for on a thread of their own, so that the next step is launched meanwhile."""

    def __init__(self, worker: Worker, link: Link, number: int, tells: bool):
        """`tells`: whether this rank sends results; the others only say that they are through."""
        self._worker = worker
        self._link = link
        self._number = number
        self._tells = tells
        self._profiler: TorchProfiler | None = None  # while a profile is under way
        self._masked: tuple[int, PendingStep] | None = None  # waits for its masks
        self._launched: queue.SimpleQueue[tuple[int, PendingStep] | None] = queue.SimpleQueue()
        self._waiter: threading.Thread | None = None
        if worker.facts.overlap:
            self._waiter = threading.Thread(target=self._wait_for_all, daemon=True)
            self._waiter.start()

    def run(self, inbox: queue.SimpleQueue[ToRank]) -> None:
        """Until `CloseRank`."""
        while not isinstance(message := inbox.get(), CloseRank):
            if isinstance(message, RunStep):
                with self._range(STEP):
                    self._launch(message)
            elif isinstance(message, DrawTokens):
                self._draw(message)
            else:
                self._link.send(self._answer(message))
        self._launched.put(None)
        if self._waiter is not None:
            self._waiter.join()
        self._worker.close()

    def _launch(self, message: RunStep) -> None:
        self._masked = None  # of a step that failed elsewhere
        try:
            with self._range(_EXECUTE):
                step = self._worker.execute(message.plan)
        except Exception as error:
            self._failed(message.number, error)
            return
        if message.plan.masked is None:
            self._launched_step(message.number, step)
        else:
            self._masked = message.number, step

    def _draw(self, message: DrawTokens) -> None:
        if self._masked is None:  # the step failed when it was launched
            return
        (number, step), self._masked = self._masked, None
        assert number == message.number
        try:
            step.sample(message.masks)
        except Exception as error:
            self._failed(number, error)
            return
        self._launched_step(number, step)

    def _launched_step(self, number: int, step: PendingStep) -> None:
        if self._waiter is None:
            with self._range(_WAIT):
                self._finish(number, step)
        else:
            self._launched.put((number, step))

    def _wait_for_all(self) -> None:
        while (entry := self._launched.get()) is not None:
            self._finish(*entry)

    def _finish(self, number: int, step: PendingStep) -> None:
        try:
            result = step.wait()
        except Exception as error:
            self._failed(number, error)
            return
        self._link.send(
            StepDone(
                number,
                _digest(result),
                result if self._tells else None,
                result.copies_done,
                result.copies_failed,
                self._worker.graph_bytes,
                result.stage_seconds,
            )
        )

    def _failed(self, number: int, error: Exception) -> None:
        logger.debug("step %d failed", number, exc_info=error)
        self._link.send(StepFailed(number, type(error).__name__, _line(error)))

    def _answer(self, message: SleepRank | WakeRank | StartTrace | StopTrace) -> Answer:
        try:
            if isinstance(message, SleepRank):
                return Answer(self._worker.sleep(message.level))
            if isinstance(message, WakeRank):
                self._worker.wake_up()
            elif isinstance(message, StartTrace):
                self._start_trace()
            else:
                self._stop_trace(message.paths)
            return Answer()
        except Exception as error:
            logger.debug("%s failed", type(message).__name__, exc_info=error)
            return Answer(0, type(error).__name__, _line(error))

    def _start_trace(self) -> None:
        from octavo.worker.profiler import TorchProfiler

        profiler = TorchProfiler()
        profiler.start()
        self._profiler = profiler

    def _stop_trace(self, paths: list[str]) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._worker.settle()  # a send is recorded until it is through, and must not outlive its record
            profiler.stop(paths[self._number] if paths else None)

    def _range(self, name: str) -> AbstractContextManager[object]:
        """A range of the trace, on the thread that launches steps."""
        return contextlib.nullcontext() if self._profiler is None else self._profiler.range(name)


def _digest(result: StepResult) -> int:
    return zlib.crc32(result.num_tokens.tobytes(), zlib.crc32(result.tokens.tobytes()))


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _read(link: Link, inbox: queue.SimpleQueue[ToRank]) -> None:
    while (frame := link.receive()) is not None:
        message = decode_to_rank(frame)
        inbox.put(message)
        if isinstance(message, CloseRank):
            return
    # The engine is gone: what this rank does (it may wait for another one) is for nobody.
    os._exit(0)


def _beat(link: Link) -> None:
    pause = threading.Event()
    while not pause.wait(BEAT_SECONDS):
        link.send(Beat())


def _die_with_parent() -> None:
    """Let Linux kill this process with the thread that started it: a stopped one can't see its socket end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no wait for libraries' threads: everything is freed with the process
