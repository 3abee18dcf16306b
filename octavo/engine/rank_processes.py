"""The processes of the parallel ranks: started, talked to, watched, and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.child import start_child
from octavo.engine.frames import send_frame, take_frames
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.parallel.wire import (
    Beat,
    CloseRank,
    DrawTokens,
    FromRank,
    RankFatal,
    RankReady,
    RankSetup,
    RunStep,
    StepDone,
    StepFailed,
    ToRank,
    decode_from_rank,
    encode,
)
from octavo.step_messages import ModelFacts

logger = logging.getLogger(__name__)

LIBRARY_SILENCE = 60.0
"""Seconds without a sign of life that end a start, or another chore: libraries may hold a process up."""
STRAGGLER_SECONDS = 10.0
"""Seconds after one rank's step failed in which the others of its stage must have answered: they may wait in
vain. Other stages get what they wait for from one that fails, and may have steps before that one to do."""
_LOOK = 0.25  # seconds between looks at the clock
_EXIT_SECONDS = 5.0
_PIECE = 1 << 18
_MODULE = "octavo.parallel.rank"


class _Rank:
    """One process, its socket, and what has come over it."""

    def __init__(self, number: int, rendezvous: int):
        self.process, self.socket = start_child([_MODULE], [rendezvous])
        self.number = number
        self.heard = time.monotonic()
        self.ready = False
        self.answered = self.due = -1  # the last step that was answered, and that is to be
        self.since = 0.0  # when the oldest step without an answer became that
        self._received = bytearray()

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.process.pid})"

    def send(self, data: bytes) -> None:
        """Send one frame.

        Raises:
            OSError: the process has ended.
        """
        send_frame(self.socket, data)

    def take(self, data: bytes) -> Iterator[FromRank]:
        """Messages that are whole now."""
        self._received += data
        return map(decode_from_rank, take_frames(self._received))

    def ending(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        with contextlib.suppress(ValueError):
            if code < 0:
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class RankProcesses:
    """Owns all ranks of an engine: they live and die together.

    A thread of its own reads what they say, so that a death is known whether or not anybody waits for an
    answer. One that ends, is silent, or leaves a step unanswered for too long ends all of them: what the
    others wait for in a collective operation never comes.

    Attributes:
        messages: what ranks said, each with its rank's number; None: they are dead.
        dead: why they are, once they are.
        on_death: called once they are, on the watcher's thread.
        patient: they do what is no step, and may be silent for long.

    Raises (on construction):
        ConfigError: this is no Linux.
        OctavoError: what a rank could not do, the first one's to say so.
    """

    def __init__(self, config: EngineConfig):
        if sys.platform != "linux":
            raise ConfigError(
                f"{config.num_ranks} ranks, each in a process of its own, need Linux: use one rank"
            )
        self.messages: queue.SimpleQueue[tuple[int, FromRank] | None] = queue.SimpleQueue()
        self.dead: EngineDeadError | None = None
        self.on_death: Callable[[], None] | None = None
        self.patient = False
        self._heartbeat = config.distributed_heartbeat_seconds
        self._deadline = config.distributed_timeout_seconds
        self._closing = False
        self._killed = False  # by a signal, one of them, before all others ended
        self._watcher: threading.Thread | None = None
        # A step that failed: number, the stage on which, when, what.
        self._failed: tuple[int, int, float, str] | None = None
        self._lock = threading.Lock()  # of the end
        self._tensor = tensor = config.tensor_parallel_size
        stages = config.pipeline_parallel_size
        self._ranks: list[_Rank] = []
        rendezvous = os.memfd_create("octavo-ranks")  # nothing is left of it, whoever is killed
        try:
            level = logging.getLogger("octavo").getEffectiveLevel()
            for number in range(tensor * stages):
                rank = _Rank(number, rendezvous)
                self._ranks.append(rank)
                setup = RankSetup(
                    dataclasses.asdict(config),
                    number,
                    tensor,
                    stages,
                    f"/proc/self/fd/{rendezvous}",
                    # All ranks would say the same.
                    level if number == 0 else max(level, logging.WARNING),
                )
                rank.send(encode(setup))
            self._watcher = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)
            self._watcher.start()
            self.facts = self._facts()
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(rendezvous)

    def __len__(self) -> int:
        return len(self._ranks)

    def _facts(self) -> list[ModelFacts]:
        """What every rank found, once all have loaded."""
        facts: dict[int, ModelFacts] = {}
        failure: EngineDeadError | None = None
        while len(facts) < len(self._ranks):
            entry = self.messages.get()
            if entry is None:
                assert self.dead is not None
                # What a rank said before it went is the reason, unless it only missed one that was killed.
                raise self.dead if failure is None or self._killed else failure
            number, message = entry
            if isinstance(message, RankFatal):
                kind = getattr(errors, message.kind, None)
                if isinstance(kind, type) and issubclass(kind, OctavoError):
                    raise kind(message.message)
                text = f"rank {number} cannot start: {message.kind}: {message.message}"
                failure = failure or EngineDeadError(text)
            elif isinstance(message, RankReady):
                facts[number] = message.facts
        return [facts[number] for number in range(len(self._ranks))]

    def broadcast(self, message: ToRank) -> None:
        """Send a message to every rank.

        Raises:
            EngineDeadError: they are dead.
        """
        data = encode(message)
        for rank in self._ranks:
            if self.dead is not None:
                raise self.dead
            try:
                rank.send(data)
            except OSError:
                reason = f"{rank} {rank.ending()}"
                self.end(reason)
                raise self.dead or EngineDeadError(reason) from None
        if isinstance(message, DrawTokens) or (isinstance(message, RunStep) and message.plan.masked is None):
            now = time.monotonic()
            for rank in self._ranks:  # whose answer is awaited from now on
                if rank.due <= rank.answered:
                    rank.since = now
                rank.due = message.number

    def close(self) -> None:
        """Let all ranks free what they hold and end; those that don't are killed."""
        self._closing = True
        for rank in self._ranks:
            rank.socket.settimeout(_EXIT_SECONDS)  # one that is stopped takes nothing
        with contextlib.suppress(EngineDeadError):
            self.broadcast(CloseRank())
        end = time.monotonic() + _EXIT_SECONDS
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(timeout=max(0.0, end - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        self._closing = True
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
        if self._watcher is not None:
            self._watcher.join()
        for rank in self._ranks:
            rank.socket.close()

    def end(self, reason: str) -> None:
        """Kill all ranks, for this reason if it is the first; of no effect while they are closed."""
        with self._lock:
            if self.dead is not None or self._closing:
                return
            self.dead = EngineDeadError(f"{reason}; all {len(self._ranks)} ranks are ended")
        started = all(rank.ready for rank in self._ranks)  # else who starts them is told
        logger.log(logging.ERROR if started else logging.DEBUG, "%s", self.dead)
        for rank in self._ranks:
            rank.process.kill()
        self.messages.put(None)
        if self.on_death is not None:
            self.on_death()
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(timeout=_EXIT_SECONDS)

    # ---- on the watcher's thread ----------------------------------------------------------------

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.socket, selectors.EVENT_READ, rank)
            looked = time.monotonic()
            while selector.get_map():
                for key, _ in selector.select(_LOOK):
                    try:
                        open_still = self._receive(key.data)
                    except Exception as error:  # nobody would be told anything from here on
                        logger.exception("what a rank says cannot be taken in")
                        self.end(f"what {key.data} says cannot be taken in: {error}")
                        open_still = False
                    if not open_still:
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - looked > 4 * _LOOK:  # it was this process that was held up
                    for rank in self._ranks:
                        rank.heard = max(rank.heard, looked)
                        rank.heard += now - looked
                        rank.since += now - looked
                looked = now
                self._look(now)

    def _receive(self, rank: _Rank) -> bool:
        """Take in what a rank has said; whether it may say more."""
        try:
            data = rank.socket.recv(_PIECE)
        except OSError:
            data = b""
        if not data:
            if not self._closing and self.dead is None:
                reason = rank.ending()
                self._killed = (rank.process.returncode or 0) < 0
                self.end(f"{rank} {reason}")
            return False
        rank.heard = time.monotonic()
        for message in rank.take(data):
            if isinstance(message, Beat):
                continue
            if isinstance(message, RankFatal) and rank.ready:
                self.end(f"{rank} cannot go on: {message.kind}: {message.message}")
                continue
            rank.ready |= isinstance(message, RankReady)
            if isinstance(message, StepDone | StepFailed):
                rank.answered, rank.since = message.number, rank.heard
                if isinstance(message, StepFailed) and self._failed is None:
                    text = f"{message.kind}: {message.message}"
                    stage = rank.number // self._tensor
                    self._failed = message.number, stage, rank.heard, f"step failed on {rank} alone ({text})"
            self.messages.put((rank.number, message))
        return True

    def _look(self, now: float) -> None:
        """End all if one is silent or late."""
        if self.dead is not None or self._closing:
            return
        for rank in self._ranks:
            waits_long = self.patient or not rank.ready
            silence = max(self._heartbeat, LIBRARY_SILENCE) if waits_long else self._heartbeat
            if now - rank.heard > silence:
                self.end(f"{rank} gives no sign of life since {now - rank.heard:.0f} s")
            elif rank.due > rank.answered and now - rank.since > self._deadline:
                seconds = f"{now - rank.since:.0f} s (distributed_timeout_seconds)"
                self.end(f"{rank} has not finished a step in {seconds}")
        if self._failed is not None:
            number, stage, when, text = self._failed
            alike = self._ranks[stage * self._tensor : (stage + 1) * self._tensor]
            if all(rank.answered >= number for rank in alike):
                self._failed = None
            elif now - when > STRAGGLER_SECONDS:
                self.end(text)
