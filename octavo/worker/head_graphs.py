"""An EAGLE-3 head's passes as CUDA graphs: a step's rows taken in by one, all drafts made by another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from octavo.kernels.batch_ops import draft_kernels
from octavo.sampling.processors import upload
from octavo.step_messages import DraftOrder
from octavo.worker.draft_passes import DraftPasses
from octavo.worker.draft_tables import DraftTables
from octavo.worker.input_batch import StepInputs
from octavo.worker.verdicts import Verdicts


class HeadGraphs:
    """Runs the head's rows in recorded passes (`RecordedDrafts` of the proposer, too).

    Rows of a padded step are taken in by a graph for each of the step's graphs, whose hidden states it reads
    where they lie. It leaves what the head made of the row before each request's newest token; there the
    drafts begin.
    """

    def __init__(self, head: Any, tables: DraftTables, passes: DraftPasses, verdicts: Verdicts):
        self._head, self._tables, self._passes, self._verdicts = head, tables, passes, verdicts
        slots, device = len(tables.batch.token_table), tables.batch.device
        self._kernels = draft_kernels(device.type)
        self._begin = torch.zeros(slots, dtype=torch.int64, device=device)  # position of a slot's first row
        self._sent: np.ndarray = np.zeros(slots, np.int64)
        self._made: torch.Tensor | None = None  # by the requests of `passes`

    def follow_and_draft(
        self,
        slots: np.ndarray,
        order: DraftOrder,
        inputs: StepInputs,
        states: Sequence[torch.Tensor],
        begin: np.ndarray,
        known: torch.Tensor | None,
    ) -> None:
        """Take in the rows of a padded step, all of whose requests are followed and have yielded tokens, and
        draft.

        Args:
            slots: int32 `[n]` on the host.
            states: the step's hidden states, at the places where its graph leaves them.
            begin: int64 `[n]` on the host, positions of the requests' first rows.
            known: int64 `[n]` on the device; only read where somebody is drafted for.
        """
        passes, size = self._passes, len(inputs.slots)
        self._set_begin(slots, begin)
        self._tables.enter_blocks(order.updates)
        most = int(order.counts.max())
        self._follow(inputs, states, most > 0)
        if most:
            assert known is not None
            passes.enter(size, slots, order.counts, known)
            self._chain(size, most, passes.draws(slots))

    def draft(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        known: torch.Tensor,
        begin: np.ndarray,
        made: torch.Tensor,
    ) -> bool:
        """See `octavo.speculative.eagle3.RecordedDrafts`."""
        size = self._passes.size_for(len(slots))
        if size is None:
            return False
        self._set_begin(slots, begin)
        self._passes.enter(size, slots, counts, known)
        self._place_of(made)[: len(made)].copy_(made)
        self._chain(size, int(counts.max()), self._passes.draws(slots))
        return True

    def _set_begin(self, slots: np.ndarray, begin: np.ndarray) -> None:
        news = np.flatnonzero(self._sent[slots] != begin)
        if len(news):
            pair = upload(np.stack((slots[news].astype(np.int64), begin[news])), self._begin.device)
            self._begin[pair[0]] = pair[1]
            self._sent[slots[news]] = begin[news]

    def _follow(self, inputs: StepInputs, states: Sequence[torch.Tensor], drafts: bool) -> None:
        """Take in a padded step's rows; if `drafts` begin behind them, leave what was made of the last."""
        padding = inputs.padding
        assert padding is not None
        size, rows, most = padding

        def work() -> None:
            first, limit, shift, last = self._begin.new_empty((4, size)).unbind()
            self._kernels.begin_follow(
                inputs.slots, inputs.starts, inputs.ends, inputs.drafts, self._verdicts.counts[:size],
                self._begin, first, limit, shift, last,
            )  # fmt: skip
            run = self._passes.place(inputs.slots, inputs.starts, first, limit, shift, rows=rows, most=most)
            run.meta[0].wanted_rows = last if drafts else last[:1]
            made = self._run(run, self._head.combine(list(states)))
            if drafts:
                self._place_of(made)[:size].copy_(made)

        self._passes.recorder.run(("follow", padding, drafts, states[0].data_ptr()), work)

    def _chain(self, size: int, most: int, draws: bool) -> None:
        """Draft for the requests of the passes, behind what was made of their rows."""
        passes = self._passes

        def work() -> None:
            slots, known, counts = (x[:size] for x in (passes.slots, passes.known, passes.counts))
            first, limit, shift = self._begin.new_empty((3, size)).unbind()
            self._kernels.begin_chain(slots, known, counts, self._begin, first, limit, shift)
            assert self._made is not None
            made = self._made[:size]
            vocabulary = self._head.vocabulary
            for j in range(most):
                if j:
                    run = passes.place(
                        slots, passes.starts(size, 1), first, limit, shift, offset=j, rows=size, most=1
                    )
                    made = self._run(run, self._head.fed_back(made))
                logits, ids = self._head.compute_logits(made), None
                if not vocabulary.whole and draws:
                    own = logits.new_full((size, self._tables.vocab_size), float("-inf"))
                    logits = own.index_copy_(1, vocabulary.target_ids, logits)
                elif not vocabulary.whole:
                    ids = vocabulary.target_ids
                passes.append(
                    size, passes.choose(logits, slots, known + j if draws else known, draws), j, ids
                )

        passes.recorder.run(("chain", size, most, draws), work)

    def _run(self, run: Any, hidden: torch.Tensor) -> torch.Tensor:
        self._head.plan_attention(run.meta)
        return self._head(run.token_ids, run.positions, self._tables.kv_caches, run.meta, hidden)

    def _place_of(self, made: torch.Tensor) -> torch.Tensor:
        if self._made is None:
            self._made = made.new_zeros((len(self._passes.slots), made.shape[1]))
        return self._made
