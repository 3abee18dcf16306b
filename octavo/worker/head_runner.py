"""An EAGLE-3 head on a worker's device: over its target's token table and hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from octavo.kernels.batch_ops import batch_kernels
from octavo.kv.draft_pages import DraftPages
from octavo.kv.format import KVGroup
from octavo.models.eagle3 import Eagle3Head
from octavo.sampling.processors import upload
from octavo.speculative.confidence import Drafted
from octavo.speculative.eagle3 import Eagle3, FollowedRows
from octavo.step_messages import DraftOrder, StepPlan
from octavo.worker.draft_passes import DraftPasses
from octavo.worker.draft_tables import DraftTables
from octavo.worker.head_graphs import HeadGraphs
from octavo.worker.input_batch import StepInputs
from octavo.worker.model_runner import ModelRunner


class HeadRunner(DraftTables):
    """Runs a head's rows (a `HeadForward` of the proposer).

    Its tables know positions of the head's cache, which begin at 0 for each request.
    """

    def __init__(
        self, head: Eagle3Head, groups: list[KVGroup], pages: DraftPages, runner: ModelRunner, **sizes: int
    ):
        super().__init__(groups, pages, runner, **sizes)
        self._head = head

    def combine(self, states: list[torch.Tensor]) -> torch.Tensor:
        """See `HeadForward`."""
        return self._head.combine(states)

    def __call__(
        self,
        plan: StepPlan,
        first: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `HeadForward`."""
        self.batch.apply(plan)
        inputs = self.batch.layout(plan)
        self.batch.num_computed[inputs.slots] = first
        self.batch.fill(inputs)
        self._head.plan_attention(inputs.meta)
        inputs.meta[0].wanted_rows = wanted
        return self._head(token_ids, inputs.positions, self.kv_caches, inputs.meta, hidden)

    def fed_back(self, made: torch.Tensor) -> torch.Tensor:
        """See `HeadForward`."""
        return self._head.fed_back(made)

    def logits(self, made: torch.Tensor) -> torch.Tensor:
        """See `HeadForward`: what the head cannot draft has -inf."""
        logits, vocabulary = self._head.compute_logits(made), self._head.vocabulary
        if vocabulary.whole:
            return logits
        out = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return out.index_copy_(1, vocabulary.target_ids, logits)


class HeadDrafter:
    """Lets a head follow a runner's steps (a `StepDrafter`), and draft what their plans ask for."""

    every_step = True

    def __init__(self, head: Eagle3, runner: ModelRunner, graphs: HeadGraphs | None = None):
        self._head, self._model, self._graphs = head, runner.model, graphs

    def enter(self, slots: np.ndarray) -> None:
        """See `StepDrafter`."""
        self._head.enter(slots)

    def after_step(
        self, plan: StepPlan, inputs: StepInputs, known: torch.Tensor | None, num_tokens: torch.Tensor | None
    ) -> Drafted | None:
        """See `StepDrafter`."""
        order = plan.propose
        if order is None or order.follows is None:
            self._head.enter(plan.slots)
            return None
        self._head.enter(plan.slots[~order.follows])
        if self._graphs is not None and self._takes(plan, inputs, order):
            begin = self._head.begin(plan.slots, plan.start.astype(np.int64))
            self._graphs.follow_and_draft(plan.slots, order, inputs, self._model.aux_states, begin, known)
            return None
        chosen, total, device = np.flatnonzero(order.follows), plan.total_rows, inputs.positions.device
        states, positions = [s[:total] for s in self._model.aux_states], inputs.positions[:total]
        if len(chosen) < len(plan.slots):
            rows = upload(np.flatnonzero(np.repeat(order.follows, plan.num_rows)), device)
            states, positions = [s.index_select(0, rows) for s in states], positions.index_select(0, rows)
        drafts = np.zeros(len(plan.slots), np.int32) if plan.num_drafts is None else plan.num_drafts
        counts, stood = order.counts[chosen], None
        drafting = np.flatnonzero(order.counts)
        if len(drafting):
            assert known is not None
            if len(drafting) < len(known):
                places = upload(np.searchsorted(inputs.sample_requests, drafting), device)
                known = known.index_select(0, places)
                num_tokens = None if num_tokens is None else num_tokens.index_select(0, places)
            stood = None if num_tokens is None else num_tokens.long() - 1
        else:
            known = positions[:0]
        drafted = self._head.follow(
            FollowedRows(
                plan.slots[chosen],
                plan.num_rows[chosen],
                plan.start[chosen].astype(np.int64),
                drafts[chosen],
                positions,
                states,
            ),
            counts,
            (plan.start + plan.num_rows)[drafting].astype(np.int64) + 1,
            known,
            stood,
            order.updates,
            order.thresholds,
        )
        if drafted is not None:
            drafted.requests = chosen[drafted.requests]
        return drafted

    @staticmethod
    def _takes(plan: StepPlan, inputs: StepInputs, order: DraftOrder) -> bool:
        """Whether a step's rows can be taken in by a recorded pass."""
        every = order.follows is not None and order.follows.all() and plan.samples.all()
        return inputs.padding is not None and bool(every) and order.thresholds is None


def attach_head(
    runner: ModelRunner,
    head: Any,
    groups: list[KVGroup],
    pages: DraftPages,
    records_passes: bool = False,
    **sizes: int,
) -> HeadRunner:
    """Let a loaded head draft after a runner's steps, by recorded passes or eagerly; `sizes` as `HeadRunner`
    takes them."""
    forward = HeadRunner(head, groups, pages, runner, **sizes)
    append = batch_kernels(runner.device.type).append_tokens
    eagle = Eagle3(forward, runner.verifier.sampler, runner.batch.token_table, append)
    graphs = None
    if records_passes:
        assert runner.graphs is not None
        passes = DraftPasses(forward, runner.verifier.sampler, runner.graphs.recorder)
        graphs = eagle.recorded = HeadGraphs(head, forward, passes, runner.verdicts)
    runner.draft = HeadDrafter(eagle, runner, graphs)
    return forward
