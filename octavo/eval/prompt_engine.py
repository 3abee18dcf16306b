"""An engine core in this process that gives logits at every position of prompts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor, PendingStep
from octavo.errors import ConfigError, RequestFailedError
from octavo.messages import CoreRequest
from octavo.sampling_params import SamplingParams
from octavo.step_messages import ModelFacts, StepPlan
from octavo.worker.worker import Worker

_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


class RecordingExecutor(Executor):
    """Runs steps on one worker as usual and keeps the hidden states of all their rows.

    Requests are told apart by their seeds, which must be unique among those that run.
    """

    def __init__(self, config: EngineConfig):
        self.worker = Worker(config)
        self.facts: ModelFacts = self.worker.facts
        model: Any = self.worker.model
        model.narrows = False  # every row is read
        model.register_forward_hook(self._keep)
        self._hidden: torch.Tensor | None = None
        self._owners: dict[int, int] = {}  # slot to seed
        self._parts: dict[int, list[torch.Tensor]] = {}

    def execute(self, plan: StepPlan) -> PendingStep:
        for admission in plan.admissions:  # after a preemption again, and then all rows as well
            self._owners[admission.slot] = admission.seed
            self._parts[admission.seed] = []
        self._hidden = None
        step = self.worker.execute(plan)
        hidden, self._hidden = self._hidden, None
        if hidden is None or len(hidden) != plan.total_rows:
            raise RuntimeError("the step's forward pass did not give a hidden state for each of its rows")
        for slot, rows in zip(plan.slots.tolist(), hidden.split(plan.num_rows.tolist()), strict=True):
            self._parts[self._owners[slot]].append(rows)
        return step

    def take(self, seed: int) -> torch.Tensor:
        """The hidden states `[rows, hidden_size]` of a request, which are forgotten here."""
        return torch.cat(self._parts.pop(seed))

    def close(self) -> None:
        self._parts.clear()
        self.worker.close()

    def _keep(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self._hidden = output.clone()  # the next step may overwrite what it gave


class PromptEngine:
    """Computes prompts by the real scheduler, cache and kernels, in steps of `max_num_batched_tokens`.

    Between the calls of several engines, device and threads are each one's own.

    Args:
        config: its settings; the prefix cache and device graphs must be off, so that every row is
            computed by a forward pass that can be seen.

    Raises (on construction):
        ConfigError, ModelError: it cannot be started.
    """

    def __init__(self, config: EngineConfig):
        assert not config.enable_prefix_caching and config.enforce_eager
        if config.runs_ranks:
            raise ConfigError(
                f"tensor_parallel_size={config.tensor_parallel_size} and pipeline_parallel_size="
                f"{config.pipeline_parallel_size}: octavo eval runs on one rank in its own process: leave "
                "them, and distributed_executor_backend, out"
            )
        self.config = config
        self.seconds = 0.0  # of `hidden`
        self._executor = RecordingExecutor(config)
        self._core = EngineCore(config, self._executor)
        self.facts = self._core.facts
        self.device = self._executor.worker.device
        self._threads = torch.get_num_threads()

    def hidden(self, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
        """Final hidden states `[len(prompt), hidden_size]` of each prompt, all computed together.

        Raises:
            RequestFailedError: a step failed.
            EngineDeadError: the device can run nothing more.
        """
        begin = time.perf_counter()
        for number, ids in enumerate(prompts):
            request = CoreRequest(
                request_id=str(number), prompt_token_ids=ids, params=_PARAMS, seed=number, stream=False
            )
            self._core.add(request)
        with self._active():
            while self._core.has_work:
                for output in self._core.step():
                    if output.error is not None:
                        raise RequestFailedError(f"a step failed: {output.error}")
            found = [self._executor.take(number) for number in range(len(prompts))]
        self.seconds += time.perf_counter() - begin
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's product: `[rows, hidden_size]` to `[rows, vocab_size]`, in the model's dtype."""
        with self._active():
            return self._executor.worker.model.compute_logits(hidden)

    def close(self) -> None:
        """Free device and memory."""
        self._core.close()

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """PyTorch's threads and current device as this engine was built with."""
        torch.set_num_threads(self._threads)
        device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), device:
            yield
