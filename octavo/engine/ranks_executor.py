"""Steps on several ranks: each plan is sent to all of them, and every rank answers once."""

from __future__ import annotations

import builtins
import collections
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.executor import Executor, PendingStep
from octavo.engine.rank_processes import RankProcesses
from octavo.engine.rank_profiler import RanksProfiler
from octavo.errors import EngineDeadError
from octavo.parallel.wire import (
    Answer,
    DrawTokens,
    RunStep,
    SleepRank,
    StepDone,
    StepFailed,
    ToRank,
    WakeRank,
)
from octavo.step_messages import StepPlan, StepResult, TokenMasks


@dataclass
class _Answers:
    """What the ranks said of one step."""

    done: list[tuple[int, StepDone]] = field(default_factory=list)
    failed: list[tuple[int, StepFailed]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.done) + len(self.failed)


def _weights(first: str, ranks: Sequence[str]) -> str:
    """How the first rank's weights are kept, and those of ranks that say something else but for the size."""

    def kept(label: str) -> str:
        return re.sub(r" \(\d+ MB\)$", "", label)

    others = dict.fromkeys(kept(label) for label in ranks if kept(label) != kept(first))
    return "; ".join((first, *(f"other ranks: {label}" for label in others)))


class RanksExecutor(Executor):
    """Several workers, each in a process of its own; the engine's holds no tensor.

    A step that all ranks of a stage fail alike is a failed step. One that some of them fail ends the engine:
    the others' tables and caches are at another point, or wait for what never comes.

    Raises (on construction):
        OctavoError: what a rank could not do.
    """

    def __init__(self, config: EngineConfig):
        self._processes = RankProcesses(config)
        self._tensor = config.tensor_parallel_size
        self._next = 0  # number of the next step
        self._answers: dict[int, _Answers] = {}
        self._copies: collections.Counter[int] = collections.Counter()  # ranks that are through with each
        self._copies_done: list[int] = []
        self._copies_failed: list[int] = []
        self._failed_somewhere: set[int] = set()
        self._graph_bytes = 0
        facts = self._processes.facts
        # The last stage's first rank tells the results; what all ranks agree on is the same in all facts.
        first = facts[config.tensor_parallel_size * (config.pipeline_parallel_size - 1)]
        self.facts = replace(
            first,
            rank_memory=[rank.memory for rank in facts],
            summary={
                **first.summary,
                "weights": _weights(first.summary["weights"], [rank.summary["weights"] for rank in facts]),
                "ranks": f"{len(facts)} processes",
            },
        )

    def execute(self, plan: StepPlan) -> PendingStep:
        number, self._next = self._next, self._next + 1
        self._processes.broadcast(RunStep(number, plan))
        return _RanksStep(self, number)

    def draw(self, number: int, masks: TokenMasks) -> None:
        """Send the masks of a step."""
        self._processes.broadcast(DrawTokens(number, masks))

    def result(self, number: int) -> StepResult:
        """Wait for every rank's answer to a step. Answers to earlier ones, for which nobody has waited, are
        passed over; what they say of copies counts.

        Raises:
            EngineDeadError: the ranks are dead, or do not agree.
            Exception: the step failed on all ranks.
        """
        answers = self._answers.setdefault(number, _Answers())
        while len(answers) < len(self._processes):
            self._take(*self._receive())
        for earlier in [n for n in self._answers if n < number]:
            passed = self._answers.pop(earlier)
            if passed.failed and not self._alike(passed):
                raise self._failure(earlier, passed)
        del self._answers[number]
        if answers.failed:
            raise self._failure(number, answers)
        stages: dict[int, list[StepDone]] = collections.defaultdict(list)
        for rank, done in answers.done:
            stages[rank // self._tensor].append(done)
        results = [done.result for _, done in answers.done if done.result is not None]
        if any(len({done.digest for done in alike}) > 1 for alike in stages.values()) or len(results) != 1:
            raise self._dead(f"the ranks drew different tokens in step {number}")
        self._graph_bytes = max(done.graph_bytes for _, done in answers.done)
        result = results[0]
        result.stage_seconds = sum(max(done.stage_seconds for done in alike) for alike in stages.values())
        result.copies_done, self._copies_done = self._copies_done, []
        result.copies_failed, self._copies_failed = self._copies_failed, []
        return result

    @property
    def graph_bytes(self) -> int:
        return self._graph_bytes

    def watch(self, notify: Callable[[], None]) -> None:
        self._processes.on_death = notify
        if self._processes.dead is not None:
            notify()

    def check(self) -> None:
        if self._processes.dead is not None:
            raise self._processes.dead

    def sleep(self, level: int) -> int:
        return sum(self._ask(SleepRank(level)))

    def wake_up(self) -> None:
        self._ask(WakeRank())

    def make_profiler(self) -> RanksProfiler:
        return RanksProfiler(self._ask, len(self._processes))

    def close(self) -> None:
        self._processes.close()

    def _ask(self, message: ToRank) -> list[int]:
        """Every rank's answer to a message that is no step.

        Raises:
            OctavoError, RuntimeError: what one of them could not do.
        """
        answers: list[Answer] = []
        self._processes.patient = True
        try:
            self._processes.broadcast(message)
            while len(answers) < len(self._processes):
                number, said = self._receive()
                if isinstance(said, Answer):
                    answers.append(said)
                else:
                    self._take(number, said)
        finally:
            self._processes.patient = False
        for answer in answers:
            if answer.kind is not None:
                raise _error(answer.kind, answer.message)
        return [answer.value for answer in answers]

    def _receive(self) -> tuple[int, object]:
        self.check()
        entry = self._processes.messages.get()
        if entry is None:
            assert self._processes.dead is not None
            raise self._processes.dead
        return entry

    def _take(self, rank: int, message: object) -> None:
        assert isinstance(message, StepDone | StepFailed)
        answers = self._answers.setdefault(message.number, _Answers())
        if isinstance(message, StepFailed):
            answers.failed.append((rank, message))
            return
        answers.done.append((rank, message))
        self._failed_somewhere.update(message.copies_failed)
        for number in (*message.copies_done, *message.copies_failed):
            self._copies[number] += 1
            if self._copies[number] == len(self._processes):
                del self._copies[number]
                failed = number in self._failed_somewhere
                self._failed_somewhere.discard(number)
                (self._copies_failed if failed else self._copies_done).append(number)

    def _failure(self, number: int, answers: _Answers) -> Exception:
        """What a step that failed somewhere is to raise."""
        rank, failed = answers.failed[0]
        for where, said in answers.failed:
            if said.kind == EngineDeadError.__name__:
                return self._dead(f"rank {where}: {said.message}")
        if not self._alike(answers):
            told = f"{failed.kind}: {failed.message}"
            return self._dead(f"step {number} failed on rank {rank} and not alike on the others ({told})")
        return _error(failed.kind, failed.message)

    def _alike(self, answers: _Answers) -> bool:
        """Whether the ranks of each stage either all failed, of one kind, or none did: a stage that fails
        still does what the others wait for."""
        stages: dict[int, list[str]] = collections.defaultdict(list)
        for rank, said in answers.failed:
            stages[rank // self._tensor].append(said.kind)
        return all(len(kinds) == self._tensor and len(set(kinds)) == 1 for kinds in stages.values())

    def _dead(self, reason: str) -> EngineDeadError:
        self._processes.end(reason)
        return self._processes.dead or EngineDeadError(reason)


class _RanksStep:
    """A step that was sent to all ranks."""

    def __init__(self, executor: RanksExecutor, number: int):
        self._executor = executor
        self._number = number

    def sample(self, masks: TokenMasks) -> None:
        """See `PendingStep`."""
        self._executor.draw(self._number, masks)

    def wait(self) -> StepResult:
        """See `PendingStep`."""
        return self._executor.result(self._number)


def _error(kind: str, message: str) -> Exception:
    """An error like the one that a rank raised."""
    known = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except TypeError:  # one that takes more than a message
            pass
    return RuntimeError(f"{kind}: {message}")
