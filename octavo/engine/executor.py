"""How the engine core runs steps: the interface, and the plain case of one worker in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.kv.format import KVGroup
from octavo.messages import StepPlan, StepResult

if TYPE_CHECKING:
    from octavo.config import EngineConfig


class PendingStep(Protocol):
    """A step that has been launched."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""


@dataclass(frozen=True)
class ModelFacts:
    """What the engine must know of the loaded model; found by the workers, equal on all of them.

    Attributes:
        max_model_len: longest context served, tokens.
        vocab_size: token ids are below it.
        groups: the KV groups.
        num_blocks: blocks of the pool.
        cache_root: 32-byte root of the block keys.
        overlap: whether steps run beside the host, so that scheduling ahead pays.
        summary: start-up figures for the log, by name.
    """

    max_model_len: int
    vocab_size: int
    groups: list[KVGroup]
    num_blocks: int
    cache_root: bytes
    overlap: bool
    max_num_batched_tokens: int
    summary: dict[str, str]


class Executor(ABC):
    """Runs the steps of one replica on its workers."""

    facts: ModelFacts

    @abstractmethod
    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch a step; steps complete in the order of launch."""

    @abstractmethod
    def close(self) -> None:
        """Free devices and memory."""


class UniprocExecutor(Executor):
    """One worker on the caller's thread."""

    def __init__(self, config: EngineConfig):
        from octavo.worker.worker import Worker  # the workers' side is heavy to import

        self._worker = Worker(config)
        self.facts = self._worker.facts

    def execute(self, plan: StepPlan) -> PendingStep:
        return self._worker.execute(plan)

    def close(self) -> None:
        self._worker.close()
