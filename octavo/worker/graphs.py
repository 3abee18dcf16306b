"""Decode steps as CUDA graphs: one launch for the whole forward pass, recorded at first use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from octavo.messages import StepPlan
from octavo.worker.input_batch import InputBatch, StepInputs

logger = logging.getLogger(__name__)

# From 128 rows on a step's time grows with them, so padding costs. Left out is 448, where cuBLAS is slow on
# Hopper (Llama-8B's gate and up projections take 271 µs there, 149 at 432, 155 at 512).
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 208, 256, 320, 384, 432, 480, 512)

# A graph, and what it leaves: this rank's part of the logits, likeliest tokens, the model's `aux_states`.
Recorded = tuple[Any, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that graphs are recorded for: few, and never much larger than the batch."""
    largest = min(max_num_seqs, SIZES[-1])
    return [*(size for size in SIZES if size < largest), largest]


class DecodeGraphs:
    """Owns the graphs of steps in which every request has one row, by padded batch size, and by whether what
    all requests share is attended to once (launches of their own, so that other steps don't pay for them).

    A graph reads the batch's buffers, gathers the inputs, runs the model, leaves the logits at a fixed
    place (a rank its part of them), and takes and appends the likeliest token of every request that samples:
    all that a step of greedy requests needs. Where others take part, the sampler chooses from the logits (of
    all ranks, gathered then) and its tokens are written over those. The first step of a size runs eagerly, on
    the padded inputs, and is then recorded (recording executes nothing); later ones are replayed. Bounds that
    the host would know better for one step (the longest context) are those of the engine, so that a graph
    serves any step.
    """

    def __init__(
        self,
        model: Any,
        batch: InputBatch,
        kv_caches: list[torch.Tensor],
        max_num_seqs: int,
        max_model_len: int,
    ):
        self._model = model
        self._batch = batch
        self._kv_caches = kv_caches
        self._max_model_len = max_model_len
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[tuple[int, bool], Recorded] = {}
        self._pool: Any = None
        self.num_bytes = 0  # of device memory that the graphs hold, the driver's part included

    def size_for(self, plan: StepPlan) -> int | None:
        """The size that a step is padded to, or None if it has to run eagerly."""
        n = len(plan.slots)
        if plan.prompt_logprobs is not None or n > self._sizes[-1] or plan.total_rows != n:
            return None
        return next(size for size in self._sizes if size >= n)

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the logits (`CausalLM.local_logits`), `[size, …]`, and likeliest tokens int32
        `[size]` of a padded step.

        The next step overwrites both.
        """
        key = len(inputs.slots), any(meta.shared_blocks for meta in inputs.meta)
        recorded = self._graphs.get(key)
        if recorded is not None:
            graph, logits, tokens, self._model.aux_states = recorded
            self._model.prepare_replay(inputs.meta)
            graph.replay()
            return logits, tokens
        for meta in inputs.meta:
            meta.max_seq_len = self._max_model_len
        results = self._forward(inputs)
        states = self._model.aux_states
        self._graphs[key] = self._record(inputs)
        self._model.aux_states = states  # those of the recording are not computed yet
        return results

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        self._batch.fill(inputs)
        hidden = self._model(inputs.entering, inputs.positions, self._kv_caches, inputs.meta)
        logits = self._model.local_logits(hidden)
        tokens = self._model.likeliest(logits).to(torch.int32)
        self._batch.append_all(inputs, tokens)
        return logits, tokens

    def _record(self, inputs: StepInputs) -> Recorded:
        self._model.prepare_capture(inputs.meta)
        free, _ = torch.cuda.mem_get_info(self._batch.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits, tokens = self._forward(inputs)
        self._pool = graph.pool()
        self.num_bytes += max(0, free - torch.cuda.mem_get_info(self._batch.device)[0])
        cascade = " that share blocks" if any(meta.shared_blocks for meta in inputs.meta) else ""
        logger.debug("recorded a graph for %d requests%s", len(inputs.slots), cascade)
        return graph, logits, tokens, self._model.aux_states
