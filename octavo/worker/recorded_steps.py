"""Decode steps on a CPU, recorded at first use: one call for the whole forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.kernels.cpu.recording import Recording, record
from octavo.kernels.cpu.step_memory import StepMemory
from octavo.step_messages import StepPlan
from octavo.worker.input_batch import StepInputs

logger = logging.getLogger(__name__)

# Requests of the largest step that is recorded. Beyond some rows the Python between the kernels, the same for
# any number, doesn't count.
MOST_REQUESTS = 16
MOST_ROWS = 2 * MOST_REQUESTS
# Rows of all recordings of steps with drafts together, which come in many shapes; the oldest give way.
_MOST_DRAFTED_ROWS = 160
_MOST_DRAFTED_REQUESTS = 2  # with more of them, few steps have the same shape
_SEEN = 3


class RecordedSteps:
    """Owns the recordings of steps of which every row yields a token, by the numbers of requests and rows.

    Such a step reads the batch's buffers, which lie where they are; only their contents differ. A model that
    does more than kernels and plain products (experts chosen on the host, attention that has no kernels) is
    found out at its first step, which is right all the same, and goes on without.
    """

    def __init__(
        self,
        model: Any,
        kv_caches: list[torch.Tensor],
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        """`finish` makes a step's result of the model's hidden states; None: their logits."""
        self._model = model
        self._finish = finish or model.compute_logits
        self._kv_caches = kv_caches
        # By requests, rows, and the most rows of a request.
        self._recorded: dict[
            tuple[int, int, int], tuple[Recording, torch.Tensor, Sequence[torch.Tensor]]
        ] = {}
        self._seen: dict[tuple[int, int, int], int] = {}  # steps of each shape with drafts
        self._refused = False
        self._memory = StepMemory()

    @property
    def num_bytes(self) -> int:
        """Memory of all recordings' tensors: what the largest takes."""
        return self._memory.num_bytes

    def takes(self, plan: StepPlan, inputs: StepInputs) -> bool:
        """Whether this is such a step."""
        n, rows = inputs.num_requests, plan.total_rows
        if rows > n:
            # Recording takes as long as a few steps: shapes that come again and again are worth it.
            key = n, rows, inputs.meta[0].max_query_len
            self._seen[key] = self._seen.get(key, 0) + 1
            if n > _MOST_DRAFTED_REQUESTS or self._seen[key] < _SEEN:
                return False
        return (
            not self._refused
            and n <= MOST_REQUESTS
            and rows == inputs.num_sample_rows
            and rows <= MOST_ROWS
            and plan.prompt_logprobs is None
        )

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[rows, vocab]` of filled inputs (what `finish` makes, rather); the next step
        that is recorded overwrites them."""
        key = inputs.num_requests, len(inputs.token_ids), inputs.meta[0].max_query_len
        recorded = self._recorded.get(key)
        if recorded is not None:
            recording, logits, self._model.aux_states = recorded
            recording.replay()
            return logits
        logits, recording = record(lambda: self._forward(inputs), self._memory)
        if recording.problem is None:
            self._recorded[key] = recording, logits, self._model.aux_states
            self._bound()
        else:
            self._refused = True
            self._memory.clear()
            logger.info("decode steps run unrecorded: %s", recording.problem)
        return logits

    def _bound(self) -> None:
        drafted = [key for key in self._recorded if key[2] > 1]
        while sum(rows for _, rows, _ in drafted) > _MOST_DRAFTED_ROWS:
            del self._recorded[drafted.pop(0)]

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        self._model.plan_attention(inputs.meta)
        inputs.meta[0].wanted_rows = None
        hidden = self._model(inputs.entering, inputs.positions, self._kv_caches, inputs.meta)
        return self._finish(hidden)
