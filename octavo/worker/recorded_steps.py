"""Decode steps on a CPU, drafts or not, recorded at first use: one call for the whole forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.kernels.cpu.recording import Recording, record
from octavo.kernels.cpu.step_memory import StepMemory
from octavo.step_messages import StepPlan
from octavo.worker.input_batch import InputBatch, StepInputs

logger = logging.getLogger(__name__)

# Of the largest step that is recorded. Beyond some rows the Python between the kernels, the same for any
# number, doesn't count.
MOST_ROWS = 64


class RecordedSteps:
    """Owns the recordings of steps of which every row yields a token, by the number of rows.

    Such a step reads the batch's buffers, which lie where they are; only their contents differ, which tell
    whose rows they are, too. A model that does more than kernels and plain products (experts chosen on the
    host, attention that has no kernels) is found out at its first step, which is right all the same, and goes
    on without.

    Attributes:
        count: steps that were recorded, too, when they were run, for which they took longer.
    """

    def __init__(
        self,
        model: Any,
        batch: InputBatch,
        kv_caches: list[torch.Tensor],
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        """`batch` makes the steps' inputs; `finish` makes a step's result of the model's hidden states; None:
        their logits."""
        self._model = model
        self._batch = batch
        self._finish = finish or model.compute_logits
        self._kv_caches = kv_caches
        self._recorded: dict[int, tuple[Recording, torch.Tensor, Sequence[torch.Tensor]]] = {}
        self._refused = False
        self.count = 0
        self._memory = StepMemory()

    @property
    def num_bytes(self) -> int:
        """Memory of all recordings' tensors: what the largest takes."""
        return self._memory.num_bytes

    def takes(self, plan: StepPlan, inputs: StepInputs) -> bool:
        """Whether this is such a step."""
        rows = plan.total_rows
        return (
            not self._refused
            and rows == inputs.num_sample_rows
            and rows <= MOST_ROWS
            and plan.prompt_logprobs is None
        )

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[rows, vocab]` of filled inputs (what `finish` makes, rather); the next step
        that is recorded overwrites them."""
        rows = len(inputs.token_ids)
        recorded = self._recorded.get(rows)
        if recorded is not None:
            recording, logits, self._model.aux_states = recorded
            recording.replay()
            return logits
        self.count += 1
        logits, recording = record(lambda: self._forward(inputs), self._memory)
        if recording.problem is None:
            self._recorded[rows] = recording, logits, self._model.aux_states
        else:
            self._refused = True
            self._memory.clear()
            logger.info("decode steps run unrecorded: %s", recording.problem)
        return logits

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        meta = self._batch.widened(inputs)
        self._model.plan_attention(meta)
        meta[0].wanted_rows = None
        hidden = self._model(inputs.entering, inputs.positions, self._kv_caches, meta)
        return self._finish(hidden)
