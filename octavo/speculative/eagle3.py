"""A head drafts from the target's hidden states (EAGLE-3, https://arxiv.org/abs/2503.01840), token by token.

The head follows the target's rows: each step's hidden states make rows in the head's KV cache, and its drafts
begin behind the last of them. Drafts are drawn with the noise of their positions, as the target draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from octavo.sampling.processors import upload
from octavo.sampling.sampler import Sampler
from octavo.speculative.confidence import Confidence, Drafted
from octavo.step_messages import BlockUpdate, StepPlan


@dataclass
class FollowedRows:
    """A step's rows of the requests that the head follows, request after request.

    Attributes:
        slots: int32 `[n]` on the host; rows: int32 `[n]`, of each.
        start: int64 `[n]`, upper bounds of the first rows' positions; exact where the head begins.
        drafts: int32 `[n]`, of the last rows, those that judge drafts.
        positions: int64 `[total rows]` on the device.
        states: hidden states `[total rows, target_hidden_size]`, three.
    """

    slots: np.ndarray
    rows: np.ndarray
    start: np.ndarray
    drafts: np.ndarray
    positions: torch.Tensor
    states: list[torch.Tensor]


class HeadForward(Protocol):
    """Runs the head's rows, with a KV cache of its own, where each request's first row has position 0."""

    def combine(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Rows' hidden states `[rows, hidden_size]` of the target's."""

    def __call__(
        self,
        plan: StepPlan,
        first: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run rows: what the layer makes of them, `[m, hidden_size]`.

        Args:
            first: int64 `[n]`, the position of each request's first row in the head's cache.
            token_ids: int32 `[rows]`, of the positions after the rows'.
            hidden: `[rows, hidden_size]`; may be overwritten.
            wanted: int64 `[m]`, the rows whose results are read; None: all.
        """

    def logits(self, made: torch.Tensor) -> torch.Tensor:
        """Logits `[m, vocab]` over the target's tokens of what rows were made to."""

    def fed_back(self, made: torch.Tensor) -> torch.Tensor:
        """The next rows' hidden states `[m, hidden_size]`."""


class RecordedDrafts(Protocol):
    """Makes all of a draft by one launch, where that can be had."""

    def draft(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        known: torch.Tensor,
        begin: np.ndarray,
        made: torch.Tensor,
    ) -> bool:
        """Draft, and append the drafts.

        Args:
            slots: int32 `[n]` on the host; counts: int32 `[n]`, drafts of each, at least 1.
            known: int64 `[n]` on the device.
            begin: int64 `[n]` on the host, position of each one's first row in the head's cache.
            made: `[n, hidden_size]`, what the head made of the rows before the newest tokens.

        Returns:
            Whether it was done; else nothing was.
        """


class Eagle3:
    """Follows the steps of the requests that it is told to, and drafts behind them; the host never waits.

    A request's rows in the head's cache begin where the head began to follow it, and have no gaps. What the
    head has there of its own drafts is overwritten by the rows of the step that judges them.

    Attributes:
        recorded: what makes drafts without thresholds, as far as it can; None: nothing does. Of what a
            request asks for it minds the temperature alone: the rest is the verifier's.
    """

    recorded: RecordedDrafts | None = None

    def __init__(
        self,
        forward: HeadForward,
        sampler: Sampler,
        token_table: torch.Tensor,
        append: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
    ):
        """Arguments as `octavo.speculative.draft_model.DraftModel`'s."""
        self._forward, self._sampler = forward, sampler
        self._table, self._append = token_table, append
        self._begin = np.full(len(token_table), -1, np.int64)  # position of a slot's first row; -1: none
        self._steps = 0

    def enter(self, slots: np.ndarray) -> None:
        """Slots (integer `[n]`) have changed hands, or their requests are followed no more."""
        self._begin[slots] = -1

    def begin(self, slots: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Positions of the first rows of some requests (int64 `[n]`), which are followed from here on if they
        were not: from `start`."""
        new = self._begin[slots] < 0
        self._begin[slots[new]] = start[new]
        return self._begin[slots]

    def follow(
        self,
        step: FollowedRows,
        counts: np.ndarray,
        most_known: np.ndarray,
        known: torch.Tensor,
        stood: torch.Tensor | None,
        updates: list[BlockUpdate],
        thresholds: tuple[float, float] | None = None,
    ) -> Drafted | None:
        """Take a step's rows in, and write drafts behind the known tokens of the token table.

        Args:
            counts: int32 `[n]` on the host, tokens to draft for each request, 0 or more.
            most_known: int64 `[m]` on the host, upper bounds of `known`, for the m requests that draft.
            known: int64 `[m]` on the device, tokens known.
            stood: int64 `[m]` on the device, how many of the drafts that the step judged stood; None: there
                were none.
            updates: new entries of the head's block tables.
            thresholds: as `DraftOrder.thresholds`.

        Returns:
            Where drafts ended (`requests` are those of `step`), if there are thresholds.
        """
        device = self._table.device
        begin, ends = self.begin(step.slots, step.start), np.cumsum(step.rows, dtype=np.int64)
        slots_d = upload(step.slots.astype(np.int64), device)
        first_row = upload(ends - step.rows, device)
        begin_d = upload(begin, device)
        owners = torch.repeat_interleave(
            slots_d, upload(step.rows.astype(np.int64), device), output_size=int(ends[-1])
        )
        # The last position of a full context has no next token, and is nobody's input.
        after = (step.positions + 1).clamp_max(self._table.shape[1] - 1)
        drafting = np.flatnonzero(counts)
        last = ends - 1 - step.drafts
        # Where nobody drafts, one row's result is made for nothing, so that layers need not take none.
        wanted = upload(last[drafting] if len(drafting) else last[:1], device)
        if stood is not None and len(drafting):
            wanted = wanted + stood
        made = self._forward(
            self._plan(step.slots, step.rows, step.start - begin, updates),
            step.positions.index_select(0, first_row) - begin_d,
            self._table[owners, after],
            self._forward.combine(step.states),
            None if len(wanted) == len(owners) else wanted,
        )
        if not len(drafting):
            return None
        index = upload(drafting, device)
        none = [BlockUpdate(*np.zeros((3, 0), np.int32)) for _ in updates]
        slots, slots_d, begin, begin_d = step.slots[drafting], slots_d[index], begin[drafting], begin_d[index]
        counts, tokens = counts[drafting], known  # until there are some
        if thresholds is None and self.recorded is not None:
            if self.recorded.draft(slots, counts, known, begin, made):
                return None
        seen, places = None, np.arange(len(drafting))
        if thresholds is not None:
            seen = Confidence(len(drafting), int(counts.max()), thresholds, device)
        for j in range(int(counts.max())):
            live = np.flatnonzero(counts > j)
            if not len(live):
                break
            if len(live) < len(slots):
                index, places = upload(live, device), places[live]
                slots, begin, counts, most_known = slots[live], begin[live], counts[live], most_known[live]
                slots_d, begin_d, known, made, tokens = (
                    x.index_select(0, index) for x in (slots_d, begin_d, known, made, tokens)
                )
            if j:
                made = self._forward(
                    self._plan(slots, np.ones(len(slots), np.int32), most_known - 2 + j - begin, none),
                    known - 2 + j - begin_d,
                    tokens,
                    self._forward.fed_back(made),
                    None,
                )
            position, logits = known + j, self._forward.logits(made)
            tokens = self._sampler(logits, slots, slots_d, position, self._table, most_known + j).tokens
            self._append(slots_d, position, tokens, self._table)
            if seen is not None:
                counts = counts * seen.take(places, j, logits, tokens)
        return None if seen is None else Drafted(drafting, seen.made, seen.products)

    def _plan(
        self, slots: np.ndarray, rows: np.ndarray, start: np.ndarray, updates: list[BlockUpdate]
    ) -> StepPlan:
        self._steps += 1
        return StepPlan(
            step_id=self._steps,
            admissions=[],
            block_updates=updates,
            slots=slots.astype(np.int32),
            num_rows=rows.astype(np.int32),
            start=start.astype(np.int32),
            samples=np.ones(len(slots), bool),
        )
