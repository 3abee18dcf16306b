"""From a scheduler's limits to what decides its drafts."""

from __future__ import annotations

from octavo.engine.draft_stops import DraftStops
from octavo.engine.drafting import Drafting, HostDrafting
from octavo.engine.head_drafting import HeadDrafting
from octavo.engine.limits import SchedulerLimits
from octavo.engine.parallel_drafting import ParallelDrafting
from octavo.engine.slots import Slots
from octavo.engine.worker_drafting import WorkerDrafting
from octavo.kv.draft_blocks import DraftBlocks
from octavo.speculative.proposer import HostProposer

_WORKER_DRAFTING: dict[str, type[WorkerDrafting]] = {"eagle3": HeadDrafting, "pard": ParallelDrafting}
# Rows of logits that drafts may bring a step to where fewer requests than that may run.
_LOGITS_ROWS = 64


def choose_drafting(
    limits: SchedulerLimits,
    slots: Slots,
    proposer: HostProposer | None,
    draft_blocks: DraftBlocks | None,
    draft_max_model_len: int,
) -> Drafting | None:
    """What decides the drafts of requests in `slots`, None without any; other arguments as `Scheduler`'s."""
    rows = max(limits.max_num_seqs, min(_LOGITS_ROWS, limits.max_num_batched_tokens))
    bounds = (limits.num_speculative_tokens, limits.adaptive_drafts, rows)
    if proposer is not None:
        return HostDrafting(proposer, slots, *bounds)
    if draft_blocks is None:
        return None
    stops = None
    if limits.stops_drafts:
        stops = DraftStops(limits.max_num_seqs, limits.num_speculative_tokens, limits.draft_confidence)
    kind = _WORKER_DRAFTING.get(limits.draft_method, WorkerDrafting)
    budget = limits.max_num_batched_tokens
    return kind(draft_blocks, slots, *bounds, budget, draft_max_model_len, stops)
