"""Runs the steps of a pipeline stage that is not the last: rows in, its layers, rows out."""

from __future__ import annotations

import time
from typing import Any

import torch

from octavo.kv.format import KVGroup
from octavo.parallel.stages import StageGroup
from octavo.step_messages import StepPlan, StepResult, TokenMasks
from octavo.worker.device_timer import DeviceTimer
from octavo.worker.graphs import DecodeGraphs
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.recorded_steps import RecordedSteps
from octavo.worker.stage_link import StageLink
from octavo.worker.transfer import event_now, wait_for


class StageRunner:
    """Owns a device's layers, KV cache and request tables. What is sampled comes back from the last stage,
    and is in the tables before a step reads it."""

    def __init__(
        self,
        model: Any,
        groups: list[KVGroup],
        kv_caches: list[torch.Tensor],
        stages: StageGroup,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        use_graphs: bool = False,
        records: bool = False,
    ):
        self.model = model
        self.device = device
        self.kv_caches = kv_caches
        self.batch = InputBatch(max_num_seqs, max_model_len, max_rows, groups, device, model.cascades())
        self.link = StageLink(stages, self.batch, (max_rows, model.config.hidden_size), dtype, device)
        self.graphs: DecodeGraphs | None = None
        if use_graphs:
            self.graphs = _StageGraphs(model, self.batch, kv_caches, max_num_seqs, max_model_len)
        self.recorded = (
            RecordedSteps(model, self.batch, kv_caches, lambda stream: stream) if records else None
        )
        self.forward_seconds = 0.0  # host time inside the model's forward, for measurements

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PassedStep:
        """Launch a step."""
        self.link.enter(plan)
        try:
            self.batch.apply(plan)
            timer = self._run(plan)
        except Exception:
            self.link.settle()
            raise
        return PassedStep(plan, timer, self.device)

    def _run(self, plan: StepPlan) -> DeviceTimer:
        padding = self.graphs.padding_for(plan) if self.graphs is not None else None
        inputs = self.batch.layout(plan, padding)
        if self.graphs is not None and padding is not None:
            timer = self.link.receive()
            stream, _ = self.graphs.run(inputs)
        else:
            self.batch.fill(inputs)
            timer, begin = self.link.receive(), time.perf_counter()
            if self.recorded is not None and self.recorded.takes(plan, inputs):
                stream = self.recorded.run(inputs)
            else:
                self.model.plan_attention(inputs.meta)
                stream = self.model(inputs.entering, inputs.positions, self.kv_caches, inputs.meta)
            self.forward_seconds += time.perf_counter() - begin
        timer.stop()
        self.link.send(stream)
        return timer


class _StageGraphs(DecodeGraphs):
    """Graphs that end with the stage's rows."""

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        self._batch.fill(inputs)
        stream = self._model(inputs.entering, inputs.positions, self._kv_caches, inputs.meta)
        return stream, stream


class PassedStep:
    """A step on its way, which yields its tokens elsewhere."""

    def __init__(self, plan: StepPlan, timer: DeviceTimer | None, device: torch.device):
        self._num_requests = len(plan.slots)
        self._timer = timer
        self._event = event_now(device)

    def sample(self, masks: TokenMasks) -> None:
        """Nothing is drawn here."""

    def wait(self) -> StepResult:
        """Block until the rows have been computed. The result has no tokens.

        Raises:
            EngineDeadError: the device reported an error that no later step can survive.
        """
        wait_for(self._event)
        n = self._num_requests
        result = StepResult.without_tokens(n)
        if self._timer is not None:
            result.stage_seconds = self._timer.seconds()
        return result
