"""A smaller model of the same vocabulary drafts, token by token.

Method: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023),
https://arxiv.org/abs/2211.17192; drafts are drawn with the noise of their positions, as the target draws, so
that both choose the same token as often as their distributions allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from octavo.sampling.processors import upload
from octavo.sampling.sampler import Sampler
from octavo.speculative.confidence import Confidence, Drafted
from octavo.step_messages import BlockUpdate, StepPlan

NO_UPDATE = BlockUpdate(*np.zeros((3, 0), np.int32))


class DraftForward(Protocol):
    """Runs the draft's steps over the shared token table, with a KV cache of its own."""

    max_rows: int

    def set_computed(self, slots: torch.Tensor, computed: torch.Tensor) -> None:
        """How many tokens of each slot (int64 `[n]` both, on the device) the draft's cache holds."""

    def __call__(self, plan: StepPlan, wanted: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits `[n, vocab]` of the requests that yield a token; None if none does.

        Args:
            wanted: int64 `[m]` on the device, rows of the step whose logits `[m, vocab]` are returned
                instead.
        """


class RecordedDrafts(Protocol):
    """Runs all of a draft by one launch, where that can be had."""

    def draft(
        self, slots: np.ndarray, counts: np.ndarray, known: torch.Tensor, updates: list[BlockUpdate]
    ) -> bool:
        """Draft token by token, and append the drafts; the last two known tokens may be new to the cache.

        Args:
            slots: int32 `[n]` on the host; counts: int32 `[n]`, drafts of each, at least 1.
            known: int64 `[n]` on the device.
            updates: of the draft's block tables.

        Returns:
            Whether it was done; else nothing was.
        """

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
        """The same, all tokens in one pass behind mask tokens.

        Args:
            new: tokens that are new to the cache, of a request at most.
            cached: int64 `[slots]` on the device, tokens of each slot that the cache holds; at the same
                address each time.
            mask: the mask token.
        """


class DraftModel:
    """Drafts for the requests of a step once its tokens are known on the device; the host waits for nothing.

    A request's first draft computes its whole text in the draft's cache. If the step before drafted too, a
    draft begins with the last two known tokens: the newest is new to it, and the one before if all drafts
    stood. Otherwise it begins where the draft's cache surely ends.

    Attributes:
        recorded: what makes drafts without thresholds, as far as it can; None: nothing does. Of what a
            request asks for it minds the temperature alone: the rest is the verifier's.
    """

    recorded: RecordedDrafts | None = None

    def __init__(
        self,
        forward: DraftForward,
        sampler: Sampler,
        token_table: torch.Tensor,
        append: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
    ):
        """
        Args:
            sampler: the target's: drafts are drawn as the target's tokens are.
            token_table: int32 `[slots, max_model_len]`, the target's, on the device.
            append: `octavo.kernels.reference_batch.append_tokens` for the device.
        """
        self._forward, self._sampler = forward, sampler
        self._table, self._append = token_table, append
        num_slots = len(token_table)
        self._valid = np.zeros(num_slots, np.int64)  # tokens that the draft's cache holds at least
        self._follows = np.zeros(num_slots, bool)  # the request's last step drafted
        self._updates: list[BlockUpdate] = []
        self._confidence: Confidence | None = None  # of the drafts that are being made
        self._judged = np.zeros(0, np.int64)  # drafts that the step judged of those that are drafted for
        self._steps = 0

    def enter(self, slots: np.ndarray) -> None:
        """Slots (integer `[n]`) have changed hands."""
        self._follows[slots] = False
        self._valid[slots] = 0

    def propose(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        least_known: np.ndarray,
        most_known: np.ndarray,
        known: torch.Tensor,
        updates: list[BlockUpdate],
        thresholds: tuple[float, float] | None = None,
        judged: np.ndarray | None = None,
    ) -> Drafted | None:
        """Draft, and write the drafts behind the known tokens of the token table.

        To be called for each step that yields tokens, also if nothing is drafted.

        Args:
            slots: int32 `[n]` on the host, requests that have yielded a token.
            counts: int32 `[n]`, tokens to draft for each, 0 or more; the draft's block tables, with
                `updates`, have room for them.
            least_known, most_known: int64 `[n]` on the host, bounds of `known`.
            known: int64 `[n]` on the device, tokens known.
            updates: new entries of the draft's block tables.
            thresholds: as `DraftOrder.thresholds`.
            judged: int32 `[n]` on the host, drafts of each that the step judged; None: nobody's.

        Returns:
            Where drafts ended (`requests` are those of this call), if there are thresholds.
        """
        self._updates, self._confidence = updates, None
        for update in updates:  # a slot whose blocks were taken back begins anew
            self.enter(update.slots[update.columns == 0])
        chosen = np.flatnonzero(counts)
        self._judged = np.zeros(len(chosen), np.int64) if judged is None else judged[chosen].astype(np.int64)
        if len(chosen):
            if thresholds is not None:
                self._confidence = Confidence(len(chosen), int(counts.max()), thresholds, known.device)
            self._catch_up(slots[chosen], most_known[chosen])
            if len(chosen) < len(slots):
                known = known[upload(chosen, known.device)]
            if thresholds is not None or not self._draft_recorded(slots[chosen], counts[chosen], known):
                self._draft(slots[chosen], counts[chosen], most_known[chosen], known)
            self._valid[slots[chosen]] = least_known[chosen]
        self._follows[slots] = counts > 0
        seen = self._confidence
        return None if seen is None else Drafted(chosen, seen.made, seen.products)

    def _catch_up(self, slots: np.ndarray, most_known: np.ndarray) -> None:
        """Compute all but the last two tokens of requests whose last step did not draft. Rows beyond the
        known tokens, if any, are computed again once these are known."""
        slots, ends = slots[~self._follows[slots]], most_known[~self._follows[slots]] - 2
        done = self._valid[slots].copy()
        while (left := np.flatnonzero(done < ends)).size:
            rows = ends[left] - done[left]
            before = np.cumsum(rows) - rows
            rows = np.clip(self._forward.max_rows - before, 0, rows)
            left, rows = left[rows > 0], rows[rows > 0]
            self._run(slots[left], rows, done[left], None, samples=False)
            done[left] += rows

    def _draft_recorded(self, slots: np.ndarray, counts: np.ndarray, known: torch.Tensor) -> bool:
        """Draft by what is recorded; whether that was possible."""
        if self.recorded is None or not self.recorded.draft(slots, counts, known, self._updates):
            return False
        self._updates = [NO_UPDATE] * len(self._updates)
        return True

    def _draft(
        self, slots: np.ndarray, counts: np.ndarray, most_known: np.ndarray, known: torch.Tensor
    ) -> None:
        slots_d, places = upload(slots.astype(np.int64), known.device), np.arange(len(slots))
        for j in range(int(counts.max())):
            live = np.flatnonzero(counts > j)
            if not len(live):
                return
            if len(live) < len(slots):
                index = upload(live, known.device)
                slots, slots_d, counts, places = slots[live], slots_d[index], counts[live], places[live]
                most_known, known = most_known[live], known[index]
            rows = np.full(len(slots), 1 if j else 2)
            logits = self._run(slots, rows, most_known + j - rows, None if j else (slots_d, known - 2))
            assert logits is not None
            position = known + j
            drawn = self._sampler(logits, slots, slots_d, position, self._table, most_known + j)
            self._append(slots_d, position, drawn.tokens, self._table)
            if self._confidence is not None:
                counts = counts * self._confidence.take(places, j, logits, drawn.tokens)

    def _run(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        start: np.ndarray,
        computed: tuple[torch.Tensor, torch.Tensor] | None,
        samples: bool = True,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """One step of the draft, from `start` on (or from what the device knows: `computed`).

        Where logits are read, requests of one row must come first.
        """
        if not samples:
            device = self._table.device
            computed = upload(slots.astype(np.int64), device), upload(start, device)
        if computed is not None:
            self._forward.set_computed(*computed)
        self._steps += 1
        order = np.argsort(rows > 1, kind="stable")  # requests of one row come first
        updates, self._updates = self._updates, [NO_UPDATE] * len(self._updates)
        return self._forward(
            StepPlan(
                step_id=self._steps,
                admissions=[],
                block_updates=updates,
                slots=slots[order].astype(np.int32),
                num_rows=rows[order].astype(np.int32),
                start=start[order].astype(np.int32),
                samples=np.full(len(slots), samples),
            ),
            wanted,
        )
