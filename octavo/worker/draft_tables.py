"""Tables and KV cache of what drafts beside a target, over the target's token table and memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.kv.draft_pages import DraftPages
from octavo.kv.format import KVGroup
from octavo.step_messages import BlockUpdate, StepPlan
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_cache import draft_caches
from octavo.worker.model_runner import ModelRunner


class DraftTables:
    """Owns them.

    Attributes:
        batch: the tables; the token table is the target's.
        kv_caches: a cache per attention layer.
        vocab_size: tokens of the target's logits.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        pages: DraftPages,
        runner: ModelRunner,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_rows: int,
    ):
        """
        Args:
            groups: the drafting model's.
            pages: how its blocks lie in the target's pages.
            runner: the target's.
            max_num_seqs, max_model_len, max_rows: as `InputBatch` takes them.
        """
        self.batch = InputBatch(max_num_seqs, max_model_len, max_rows, list(groups), runner.device)
        self.batch.token_table = runner.batch.token_table
        self.kv_caches = draft_caches(runner.kv_caches, groups, pages)
        self.vocab_size = runner.vocab_size

    def enter_blocks(self, updates: list[BlockUpdate]) -> None:
        """Enter new blocks into the tables."""
        if any(len(update.slots) for update in updates):
            none = np.zeros(0, np.int32)
            self.batch.apply(StepPlan(0, [], updates, none, none, none, none.astype(bool)))

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of as many tokens as the target has: vocabularies are padded to different sizes."""
        missing = self.vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
