"""Decode steps as CUDA graphs: one launch for the whole forward pass, recorded at first use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from octavo.step_messages import StepPlan
from octavo.worker.graph_recorder import GraphRecorder
from octavo.worker.input_batch import InputBatch, Padding, StepInputs

logger = logging.getLogger(__name__)

# From 128 rows on a step's time grows with them, so padding costs. Left out is 448, where cuBLAS is slow on
# Hopper (Llama-8B's gate and up projections take 271 µs there, 149 at 432, 155 at 512).
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 208, 256, 320, 384, 432, 480, 512)
# Rows of a request beyond which a step that judges drafts runs eagerly: suffix look-ups draft 24 tokens.
MOST_ROWS = 32


class Recorded(NamedTuple):
    """A graph, and what it leaves: this rank's part of the logits, likeliest tokens, the model's
    `aux_states`."""

    graph: Any
    logits: torch.Tensor
    tokens: torch.Tensor
    states: Sequence[torch.Tensor]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that graphs are recorded for: few, and never much larger than the batch."""
    largest = min(max_num_seqs, SIZES[-1])
    return [*(size for size in SIZES if size < largest), largest]


class DecodeGraphs:
    """Owns the graphs of steps of one row a request, and of those that judge drafts, whose requests have 1 to
    `Padding.most` rows: one for each padding, and another where what all requests share is attended to once
    (launches of their own, so that other steps don't pay for them).

    A graph reads the batch's buffers, gathers the inputs, runs the model, leaves the logits (a rank its part
    of them) and the likeliest tokens at fixed places, and, where requests have one row, appends these: all
    that a step of greedy requests needs. Where others take part, the sampler chooses from the logits (of all
    ranks, gathered then) and its tokens are written over those. The first step of a padding runs eagerly, on
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
        self._graphs: dict[tuple[Padding, bool], Recorded] = {}
        self.recorder = GraphRecorder(batch.device)

    @property
    def num_bytes(self) -> int:
        """Of device memory that the graphs hold, the driver's part included."""
        return self.recorder.num_bytes

    def padding_for(self, plan: StepPlan) -> Padding | None:
        """What a step is padded to, or None if it has to run eagerly."""
        n, rows = len(plan.slots), plan.total_rows
        if plan.prompt_logprobs is not None or n > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= n)
        if rows == n:
            return Padding(size, size, 1) if size <= self._batch.max_rows else None
        drafts = plan.num_drafts
        if drafts is None or not plan.samples.all() or (plan.num_rows != drafts + 1).any():
            return None
        most = int(plan.num_rows.max())
        # As many as if all had the most, or the next size, where only some have drafts.
        wide = min((other for other in SIZES if other >= rows), default=size * most)
        padded = min(size * most, wide)
        if most > MOST_ROWS or padded > min(SIZES[-1], self._batch.max_rows):
            return None
        return Padding(size, padded, most)

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the logits (`CausalLM.local_logits`), `[rows, …]`, and likeliest tokens int32
        `[rows]` of a padded step.

        The next step overwrites both.
        """
        assert inputs.padding is not None
        key = inputs.padding, any(meta.shared_blocks for meta in inputs.meta)
        recorded = self._graphs.get(key)
        if recorded is not None:
            self._model.aux_states = recorded.states
            self._model.prepare_replay(inputs.meta)
            recorded.graph.replay()
            return recorded.logits, recorded.tokens
        for meta in inputs.meta:
            meta.max_seq_len = self._max_model_len
        results = self._forward(inputs)
        states = self._model.aux_states
        recorded = self._graphs[key] = self._record(inputs)
        # Where those of the recording lie, which are not computed yet: what reads them may be recorded, too.
        for place, state in zip(recorded.states, states, strict=True):
            place.copy_(state)
        self._model.aux_states = recorded.states
        return results

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        self._batch.fill(inputs)
        hidden = self._model(inputs.entering, inputs.positions, self._kv_caches, inputs.meta)
        logits = self._model.local_logits(hidden)
        tokens = self._model.likeliest(logits).to(torch.int32)
        if inputs.padding is not None and inputs.padding.most == 1:
            self._batch.append_all(inputs, tokens)
        return logits, tokens

    def _record(self, inputs: StepInputs) -> Recorded:
        self._model.prepare_capture(inputs.meta)

        def work() -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
            return *self._forward(inputs), self._model.aux_states

        graph, (logits, tokens, states) = self.recorder.record(work)
        cascade = " that share blocks" if any(meta.shared_blocks for meta in inputs.meta) else ""
        logger.debug("recorded a graph for %s%s", inputs.padding, cascade)
        return Recorded(graph, logits, tokens, states)
