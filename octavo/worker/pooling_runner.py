"""Runs the steps of an engine that makes embeddings: gather inputs, forward, pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from octavo.kv.format import KVGroup
from octavo.models.pooling import Pooler
from octavo.step_messages import StepPlan, StepResult, TokenMasks
from octavo.worker.input_batch import InputBatch
from octavo.worker.transfer import event_now, to_host, wait_for


class PoolingRunner:
    """Owns a device's model, KV cache, request tables and what has been pooled so far.

    To the scheduler an embedding is a request for one token: its last row "samples", and brings the
    pooled vector instead.
    """

    graphs = None
    recorded = None

    def __init__(
        self,
        model: Any,
        groups: list[KVGroup],
        kv_caches: list[torch.Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_rows: int,
        hidden_size: int,
        device: torch.device,
        pooling_type: str,
    ):
        self.model = model
        self.kv_caches = kv_caches
        self.device = device
        self.batch = InputBatch(max_num_seqs, max_model_len, max_rows, groups, device)
        self.pooler = Pooler(pooling_type, max_num_seqs, hidden_size, device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> LaunchedPooling:
        """Launch a step; its result is fetched by `LaunchedPooling.wait`."""
        self.batch.apply(plan)
        if plan.admissions:
            self.pooler.forget(torch.tensor([a.slot for a in plan.admissions], device=self.device))
        inputs = self.batch.layout(plan, None)
        self.batch.fill(inputs)
        self.model.plan_attention(inputs.meta)
        hidden = self.model(inputs.token_ids, inputs.positions, self.kv_caches, inputs.meta)
        counts = torch.from_numpy(plan.num_rows.astype(np.int64)).to(self.device)
        row_slots = torch.repeat_interleave(inputs.slots, counts, output_size=len(hidden))
        self.pooler.add(hidden, row_slots, inputs.positions)
        pooled = None
        if len(inputs.sample_requests):
            last = inputs.sample_rows
            if last is None:  # every request has one row, its last
                last = torch.arange(len(hidden), device=self.device)
            ends = self.batch.sample_ends(inputs)
            pooled = self.pooler.take(hidden, last, inputs.sample_slots, ends)
        return LaunchedPooling(plan, inputs.sample_requests, pooled, self.device)


class LaunchedPooling:
    """A step on its way: its vectors are being copied to the host."""

    def __init__(
        self, plan: StepPlan, requests: np.ndarray, pooled: torch.Tensor | None, device: torch.device
    ):
        self._num_requests = len(plan.slots)
        self._requests = requests
        self._pooled = None if pooled is None else to_host(pooled)
        self._event = event_now(device)

    def sample(self, masks: TokenMasks) -> None:
        """Vectors are not drawn."""
        raise ValueError("an embedding has no tokens to draw")

    def wait(self) -> StepResult:
        """Block until the results are here.

        Raises:
            EngineDeadError: the device reported an error that no later step can survive.
        """
        wait_for(self._event)
        n = self._num_requests
        result = StepResult.without_tokens(n)
        if self._pooled is not None:
            result.num_tokens[self._requests] = 1
            result.pooled = [None] * n
            for request, vector in zip(self._requests.tolist(), self._pooled.numpy(), strict=True):
                result.pooled[request] = vector.tobytes()
        return result
