"""What a scheduler must keep within."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one step and of the running set (see the settings of the same names)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    long_prefill_token_threshold: int = 0
    use_priority: bool = False
    find_shared_prefix: bool = True
    look_ahead: bool = True
    num_speculative_tokens: int = 0
    adaptive_drafts: bool = True
    draft_method: str = "draft_model"  # of what drafts on the workers
    stops_drafts: bool = False  # workers' drafts end for lack of confidence
    draft_confidence: float | None = None  # below which they do; None: it is learned
    pipeline_stages: int = 1

    @property
    def most_rows(self) -> int:
        """Rows of one request in a step."""
        return self.long_prefill_token_threshold or self.max_model_len
