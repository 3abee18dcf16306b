"""How the engine core runs steps: the interface, and the plain case of one worker in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from octavo.engine.profiling import Profiler, torch_profiler
from octavo.errors import RequestError
from octavo.kv.tiers import BlockStore
from octavo.step_messages import ModelFacts, StepPlan, StepResult, TokenMasks

if TYPE_CHECKING:
    from octavo.config import EngineConfig


class PendingStep(Protocol):
    """A step that has been launched."""

    def sample(self, masks: TokenMasks) -> None:
        """Draw the tokens of a step with `masked` requests: once, before `wait` and the next launch."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""


class Executor(ABC):
    """Runs the steps of one replica on its workers."""

    facts: ModelFacts
    block_store: BlockStore | None = None  # the tier of KV blocks behind host memory

    @abstractmethod
    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch a step; steps complete in the order of launch."""

    @property
    def graph_bytes(self) -> int:
        """Device memory that recorded steps hold now."""
        return 0

    def sleep(self, level: int) -> int:
        """Give memory back while no step runs: the KV cache, and the weights (level 1: those of devices, into
        host memory; level 2: all). Returns the bytes that were freed.

        Raises:
            RequestError: it cannot be done with these settings.
        """
        raise RequestError("this engine cannot sleep")

    def wake_up(self) -> None:
        """Take the memory again; the KV cache is empty then. May be called again if it fails.

        Raises:
            OctavoError, RuntimeError: there is too little memory, or the checkpoint cannot be read.
        """
        raise RequestError("this engine cannot sleep")

    def make_profiler(self) -> Profiler:
        """What records the steps that are launched, wherever they run."""
        return torch_profiler()

    def watch(self, notify: Callable[[], None]) -> None:  # noqa: B027 (one worker cannot die alone)
        """Have `notify` called, on any thread, when the workers have died; `check` then says why."""

    def check(self) -> None:  # noqa: B027
        """Raises EngineDeadError if the workers have died."""

    @abstractmethod
    def close(self) -> None:
        """Free devices and memory."""


def make_executor(config: EngineConfig) -> Executor:
    """What runs an engine's steps: its own process, or one for each rank.

    Raises:
        OctavoError: the workers cannot be started.
    """
    if config.runs_ranks:
        from octavo.engine.ranks_executor import RanksExecutor

        return RanksExecutor(config)
    return UniprocExecutor(config)


class UniprocExecutor(Executor):
    """One worker on the caller's thread."""

    def __init__(self, config: EngineConfig):
        from octavo.worker.kernel_compiler import start_compiler

        self._compiler = start_compiler(config)
        try:
            from octavo.worker.worker import Worker  # the workers' side is heavy to import

            self._worker = Worker(config, self._compiler)
        except BaseException:
            self._close_compiler()
            raise
        self.facts = self._worker.facts
        tiers = self._worker.tiers
        self.block_store = None if tiers is None else tiers.store

    def execute(self, plan: StepPlan) -> PendingStep:
        return self._worker.execute(plan)

    @property
    def graph_bytes(self) -> int:
        return self._worker.graph_bytes

    def sleep(self, level: int) -> int:
        return self._worker.sleep(level)

    def wake_up(self) -> None:
        self._worker.wake_up()

    def close(self) -> None:
        self._close_compiler()
        self._worker.close()

    def _close_compiler(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


class EncoderExecutor:
    """One encoder on the caller's thread."""

    def __init__(self, config: EngineConfig):
        from octavo.worker.encoder_worker import EncoderWorker  # the workers' side is heavy to import

        self._worker = EncoderWorker(config)
        self.facts: ModelFacts = self._worker.facts

    def encode(self, texts: list[list[int]]) -> list[bytes]:
        """Each text's vector as native float32, computed as one batch."""
        return [vector.tobytes() for vector in self._worker.encode(texts)]

    def make_profiler(self) -> Profiler:
        """See `Executor.make_profiler`."""
        return torch_profiler()

    def close(self) -> None:
        """Free device and memory."""
        self._worker.close()
