"""The draft model on a worker's device: loaded beside the target, run over the target's token table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from octavo.kernels.batch_ops import batch_kernels
from octavo.kv.draft_pages import DraftPages
from octavo.kv.format import KVGroup
from octavo.speculative.confidence import Drafted
from octavo.speculative.draft_model import DraftModel
from octavo.speculative.pard import Pard
from octavo.step_messages import StepPlan
from octavo.worker.draft_graphs import DraftGraphs
from octavo.worker.draft_loading import LoadedDraft
from octavo.worker.draft_passes import DraftPasses
from octavo.worker.draft_tables import DraftTables
from octavo.worker.input_batch import StepInputs
from octavo.worker.model_runner import ModelRunner
from octavo.worker.recorded_steps import RecordedSteps


class DraftRunner(DraftTables):
    """Runs a draft model's steps (a `DraftForward` of the proposer).

    Attributes:
        max_rows: most rows of a step.
        recorded: its recorded steps, on a CPU.
    """

    def __init__(
        self,
        model: Any,
        groups: list[KVGroup],
        pages: DraftPages,
        runner: ModelRunner,
        *,
        max_rows: int,
        records: bool,
        **sizes: int,
    ):
        super().__init__(groups, pages, runner, max_rows=max_rows, **sizes)
        self._model, self.max_rows = model, max_rows
        self.recorded = RecordedSteps(model, self.batch, self.kv_caches) if records else None
        if self.recorded is not None:
            runner.recorders.append(self.recorded)

    def set_computed(self, slots: torch.Tensor, computed: torch.Tensor) -> None:
        """See `DraftForward`."""
        self.batch.num_computed[slots] = computed

    def __call__(self, plan: StepPlan, wanted: torch.Tensor | None = None) -> torch.Tensor | None:
        """See `DraftForward`."""
        self.batch.apply(plan)
        inputs = self.batch.layout(plan)
        self.batch.fill(inputs)
        if wanted is None and self.recorded is not None and self.recorded.takes(plan, inputs):
            return self.fit(self.recorded.run(inputs))
        self._model.plan_attention(inputs.meta)
        narrowed, picked = inputs.wanted_rows, inputs.sample_rows
        if wanted is not None:
            narrowed = picked = wanted
        inputs.meta[0].wanted_rows = narrowed if self._model.narrows else None
        hidden = self._model(inputs.token_ids, inputs.positions, self.kv_caches, inputs.meta)
        if not len(inputs.sample_requests):
            return None
        if inputs.meta[0].wanted_rows is None and picked is not None:
            hidden = hidden[picked]
        return self.fit(self._model.compute_logits(hidden))


class DraftModelDrafter:
    """Lets a draft model follow a runner's steps (a `StepDrafter`)."""

    every_step = False

    def __init__(self, draft: DraftModel):
        self._draft = draft

    def enter(self, slots: np.ndarray) -> None:
        """See `StepDrafter`."""
        self._draft.enter(slots)

    def after_step(
        self, plan: StepPlan, inputs: StepInputs, known: torch.Tensor | None, num_tokens: torch.Tensor | None
    ) -> Drafted | None:
        """See `StepDrafter`."""
        assert known is not None
        chosen, order = inputs.sample_requests, plan.propose
        most = (plan.start + plan.num_rows)[chosen].astype(np.int64) + 1
        least = most - (0 if inputs.num_drafts is None else inputs.num_drafts)
        if plan.in_doubt is not None:
            least = least - plan.in_doubt[chosen]
        counts = np.zeros(len(chosen), np.int32) if order is None else order.counts[chosen]
        updates = [] if order is None else order.updates
        thresholds = None if order is None else order.thresholds
        drafted = self._draft.propose(
            plan.slots[chosen], counts, least, most, known, updates, thresholds, inputs.num_drafts
        )
        if drafted is not None:
            drafted.requests = chosen[drafted.requests]
        return drafted


def attach_draft(
    runner: ModelRunner,
    draft: LoadedDraft,
    pages: DraftPages,
    most_drafts: int,
    records_passes: bool = False,
    **sizes: Any,
) -> DraftRunner:
    """Let a loaded draft model draft after a runner's steps, by recorded passes or eagerly; `sizes` as
    `DraftRunner` takes them."""
    mask = draft.mask_token
    if mask is not None:  # a request's pass, up to as many rows for new tokens as for masks, is never cut
        sizes["max_rows"] = max(sizes["max_rows"], 2 * most_drafts)
    forward = DraftRunner(draft.model, draft.groups, pages, runner, **sizes)
    append = batch_kernels(runner.device.type).append_tokens
    parts = (forward, runner.verifier.sampler, runner.batch.token_table, append)
    drafter = DraftModel(*parts) if mask is None else Pard(*parts, mask_token=mask)
    # A recorded pass of masks may read behind what is written, for weights of 0. In pages that had the
    # target's KV, codes of 8 bits may be no numbers there; those of a cache of the draft's dtype are finite.
    finite = mask is None or runner.kv_caches[0].dtype is forward.kv_caches[0].dtype
    if records_passes and finite:
        assert runner.graphs is not None
        passes = DraftPasses(forward, runner.verifier.sampler, runner.graphs.recorder)
        drafter.recorded = DraftGraphs(draft.model, forward, passes)
    runner.draft = DraftModelDrafter(drafter)
    return forward
