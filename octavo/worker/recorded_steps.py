"""Decode steps on a CPU, recorded at first use: one call for the whole forward pass."""

from __future__ import annotations

import logging
from typing import Any

import torch

from octavo.kernels.cpu.recording import Recording, record
from octavo.messages import StepPlan
from octavo.worker.input_batch import StepInputs

logger = logging.getLogger(__name__)

# Requests of the largest step that is recorded. Each size takes the memory of its hidden states and logits;
# beyond some rows the Python between the kernels, the same for any number, doesn't count.
MOST_REQUESTS = 16


class RecordedSteps:
    """Owns the recordings of steps in which every request has one row and samples, by the number of requests.

    Such a step reads the batch's buffers, which lie where they are; only their contents differ. A model that
    does more than kernels and plain products (experts chosen on the host, attention that has no kernels) is
    found out at its first step, which is right all the same, and goes on without.
    """

    def __init__(self, model: Any, kv_caches: list[torch.Tensor]):
        self._model = model
        self._kv_caches = kv_caches
        self._recorded: dict[int, tuple[Recording, torch.Tensor]] = {}
        self._refused = False

    def takes(self, plan: StepPlan, inputs: StepInputs) -> bool:
        """Whether this is such a step."""
        n = inputs.num_requests
        return (
            not self._refused
            and n <= MOST_REQUESTS
            and plan.total_rows == n == len(inputs.sample_requests)
            and plan.prompt_logprobs is None
        )

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[n, vocab]` of filled inputs; the next step of as many requests overwrites them."""
        recorded = self._recorded.get(inputs.num_requests)
        if recorded is not None:
            recording, logits = recorded
            recording.replay()
            return logits
        logits, recording = record(lambda: self._forward(inputs))
        if recording.problem is None:
            self._recorded[inputs.num_requests] = recording, logits
        else:
            self._refused = True
            logger.info("decode steps run unrecorded: %s", recording.problem)
        return logits

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        self._model.plan_attention(inputs.meta)
        inputs.meta[0].wanted_rows = None
        hidden = self._model(inputs.token_ids, inputs.positions, self._kv_caches, inputs.meta)
        return self._model.compute_logits(hidden)
