"""A draft model that was taught to draft several tokens in one pass.

Method: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation" (2025),
https://arxiv.org/abs/2504.18583: behind the known tokens stand mask tokens, and the row of the newest token
and those of the masks each make a draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from octavo.sampling.processors import upload
from octavo.speculative.draft_model import NO_UPDATE, DraftModel


class Pard(DraftModel):
    """Drafts k tokens by one pass over the tokens that are new to the draft's cache and k - 1 masks.

    What the cache holds of masks is nobody's: the next pass begins where the known tokens ended, and
    overwrites it. Rows of one pass don't see each other's drafts, only masks in their places.
    """

    def __init__(self, *args: Any, mask_token: int):
        """Arguments as `DraftModel`'s, and the id of the masks."""
        super().__init__(*args)
        self._mask = mask_token
        num_slots, device = len(self._table), self._table.device
        self._cached = torch.zeros(num_slots, dtype=torch.int64, device=device)  # known tokens in the cache
        self._host_sees = device.type == "cpu"  # what the device knows

    def _draft_recorded(self, slots: np.ndarray, counts: np.ndarray, known: torch.Tensor) -> bool:
        """See `DraftModel`."""
        if self.recorded is None:
            return False
        follows, device = self._follows[slots], known.device
        new = int(np.where(follows, self._judged + 1, 2).max())
        others = np.flatnonzero(~follows)
        if len(others):
            self._cached[upload(slots[others].astype(np.int64), device)] = known[upload(others, device)] - 2
        if not self.recorded.draft_at_once(
            slots, counts, known, self._updates, new, self._cached, self._mask
        ):
            return False
        self._updates = [NO_UPDATE] * len(self._updates)
        self._cached[upload(slots.astype(np.int64), device)] = known
        return True

    def _draft(
        self, slots: np.ndarray, counts: np.ndarray, most_known: np.ndarray, known: torch.Tensor
    ) -> None:
        follows, counts = self._follows[slots], counts.astype(np.int64)
        slots_d, follows_d = upload(slots.astype(np.int64), known.device), upload(follows, known.device)
        cached = torch.where(follows_d, self._cached[slots_d], known - 2)
        if self._host_sees:
            most_known, new = known.numpy(), (known - cached).numpy()
        else:
            new = np.where(follows, self._judged + 1, 2)  # at most
        rows = new + counts - 1
        for part in _parts(rows, self._forward.max_rows):
            index = upload(part, known.device)
            self._pass(
                slots[part], slots_d[index], counts[part], rows[part], most_known[part], known[index],
                cached[index],
            )  # fmt: skip
        self._cached[slots_d] = known

    def _pass(
        self,
        slots: np.ndarray,
        slots_d: torch.Tensor,
        counts: np.ndarray,
        rows: np.ndarray,
        most_known: np.ndarray,
        known: torch.Tensor,
        cached: torch.Tensor,
    ) -> None:
        """Draft for some requests: their `rows` begin at `cached`, and reach to the last mask or beyond it,
        where what stands in the table is read, and its results by nobody."""
        owner = np.repeat(np.arange(len(slots)), counts)
        offset = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
        masks = np.flatnonzero(offset < (counts - 1)[owner])
        first = np.cumsum(rows) - rows
        sizes = (len(owner), len(owner), len(masks), len(first))
        packed = upload(np.concatenate((owner, offset, masks, first)), known.device)
        owner_d, offset_d, masks_d, first_d = packed.split(sizes)
        slots_d, position = slots_d[owner_d], known[owner_d] + offset_d
        self._table[slots_d[masks_d], position[masks_d]] = self._mask
        wanted = (first_d + known - 1 - cached)[owner_d] + offset_d
        start = most_known + counts - 1 - rows
        computed = upload(slots.astype(np.int64), known.device), cached
        logits = self._run(slots, rows, start, computed, wanted=wanted)
        assert logits is not None
        slots, most = slots[owner], most_known[owner] + offset
        if not self._sampler.reads_tokens(slots):
            drawn = self._sampler(logits, slots, slots_d, position, self._table, most)
            self._append(slots_d, position, drawn.tokens, self._table)
            return
        for j in range(int(counts.max())):  # each conditioned on the drafts before it
            own = np.flatnonzero(offset == j)
            index = upload(own, known.device)
            places = slots_d[index], position[index]
            drawn = self._sampler(logits[index], slots[own], *places, self._table, most[own])
            self._append(*places, drawn.tokens, self._table)


def _parts(rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Indexes of requests, those of one row first, in parts of at most `most` rows each."""
    order = np.argsort(rows > 1, kind="stable")
    begin = total = 0
    for i, count in enumerate(rows[order].tolist()):
        if total + count > most and i > begin:
            yield order[begin:i]
            begin, total = i, 0
        total += count
    yield order[begin:]
