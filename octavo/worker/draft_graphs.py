"""A draft model's passes as CUDA graphs: all of a draft in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from octavo.step_messages import BlockUpdate
from octavo.worker.draft_passes import DraftPass, DraftPasses
from octavo.worker.draft_tables import DraftTables


class DraftGraphs:
    """Runs the passes of a draft model, token by token or for all tokens at once (`RecordedDrafts` of the
    proposer)."""

    def __init__(self, model: Any, tables: DraftTables, passes: DraftPasses):
        self._model, self._tables, self._passes = model, tables, passes

    def draft(
        self, slots: np.ndarray, counts: np.ndarray, known: torch.Tensor, updates: list[BlockUpdate]
    ) -> bool:
        """See `RecordedDrafts`."""
        size = self._passes.size_for(len(slots), 2)
        if size is None:
            return False
        self._tables.enter_blocks(updates)
        self._passes.enter(size, slots, counts, known)
        self._chain(size, int(counts.max()), self._passes.draws(slots))
        return True

    def draft_at_once(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        known: torch.Tensor,
        updates: list[BlockUpdate],
        new: int,
        cached: torch.Tensor,
        mask: int,
    ) -> bool:
        """See `RecordedDrafts`."""
        most = int(counts.max())
        size = self._passes.size_for(len(slots), new + most - 1)
        if size is None:
            return False
        self._tables.enter_blocks(updates)
        self._passes.enter(size, slots, counts, known)
        self._at_once(size, new, most, self._passes.draws(slots), cached, mask)
        return True

    def _chain(self, size: int, most: int, draws: bool) -> None:
        """The first pass has the last two known tokens, which may be new to the cache."""
        passes = self._passes

        def work() -> None:
            slots, known, counts = (x[:size] for x in (passes.slots, passes.known, passes.counts))
            zeros, newest = passes.zeros[:size], known - 1
            limit = (newest + counts).masked_fill(counts == 0, 0)
            for j in range(most):
                rows = 1 if j else 2
                run = passes.place(
                    slots, passes.starts(size, rows), newest, limit, zeros,
                    offset=j + 1 - rows, rows=size * rows, most=rows,
                )  # fmt: skip
                wanted = None if j else passes.starts(size, 2)[1:].long() - 1
                passes.append(
                    size,
                    passes.choose(self._logits(run, wanted), slots, known + j if draws else known, draws),
                    j,
                )

        passes.recorder.run(("chain", size, most, draws), work)

    def _at_once(self, size: int, new: int, most: int, draws: bool, cached: torch.Tensor, mask: int) -> None:
        passes = self._passes

        def work() -> None:
            slots, known, counts = (x[:size] for x in (passes.slots, passes.known, passes.counts))
            masks = torch.full_like(slots, mask)
            for j in range(most - 1):  # in the places of the drafts but the last
                passes.append(size, masks, j)
            first, rows = cached.index_select(0, slots), new + most - 1
            limit = (known - 1 + counts).masked_fill(counts == 0, 0)
            run = passes.place(
                slots,
                passes.starts(size, rows),
                first,
                limit,
                passes.zeros[:size],
                rows=size * rows,
                most=rows,
            )
            column = torch.arange(most, device=slots.device)
            newest = passes.starts(size, rows)[:-1] + (known - 1 - first).clamp(0, new - 1)
            logits = self._logits(run, (newest[:, None] + column).flatten())
            places = (known[:, None] + column).flatten()
            tokens = passes.choose(logits, slots[:, None].expand(size, most).flatten(), places, draws)
            for j in range(most):
                passes.append(size, tokens.view(size, most)[:, j], j)

        passes.recorder.run(("at once", size, new, most, draws), work)

    def _logits(self, run: DraftPass, wanted: torch.Tensor | None) -> torch.Tensor:
        self._model.plan_attention(run.meta)
        run.meta[0].wanted_rows = wanted if self._model.narrows else None
        hidden = self._model(run.token_ids, run.positions, self._tables.kv_caches, run.meta)
        if wanted is not None and not self._model.narrows:
            hidden = hidden.index_select(0, wanted)
        return self._tables.fit(self._model.compute_logits(hidden))
