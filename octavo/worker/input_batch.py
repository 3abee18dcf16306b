"""The device's own tables of running requests, and how a step's inputs are gathered from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.batch_ops import batch_kernels
from octavo.kv.format import KVFormat, KVGroup
from octavo.layers.attention import LONG_PROMPT, AttentionMetadata, pays_to_share
from octavo.step_messages import StepPlan


class Padding(NamedTuple):
    """What a step is padded to.

    Attributes:
        requests, rows: of the padded step.
        most: rows of a request, at most.
    """

    requests: int
    rows: int
    most: int


@dataclass
class StepInputs:
    """What one forward pass reads. Device tensors unless said otherwise.

    Attributes:
        token_ids: int32 `[rows]`; positions: int64 `[rows]`, of each token in its request.
        meta: attention metadata per KV group.
        slots: int64 `[n]`, the step's requests; ends: int64 `[n]`, their context lengths after it.
        starts: int32 `[n + 1]`, each request's first row.
        num_requests: requests of the plan, n less the padding.
        max_seq_len: host's upper bound of `ends`.
        sample_requests: host, indexes of the requests that sample.
        sample_slots: `slots` of those, int64 `[m]`.
        num_sample_rows: rows that yield a token: one of each of those, and one per draft.
        sample_rows: int64 `[num_sample_rows]`, these rows (each one's last), or None if they are the first in
            order.
        num_drafts: host, int32 `[m]`, drafts of the requests that sample; None: nobody's.
        drafts: int64 `[n]`, drafts of each request that the step judges.
        padding: what the step is padded to; None: it isn't.
        stream: on a later pipeline stage, the residual stream as it left the one before, `[rows,
            hidden_size]`; None: the rows are tokens.
        wanted_rows: the rows whose hidden states are read where only sampling reads them: `sample_rows`, or
            if nobody samples a single row (layers need not take none); None: all.

    Padding (for device graphs, which have fixed sizes) are requests without rows at the end, and rows
    that belong to nobody and are stored nowhere.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    meta: list[AttentionMetadata]
    slots: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    num_requests: int
    max_seq_len: int
    sample_requests: np.ndarray
    sample_slots: torch.Tensor
    num_sample_rows: int
    sample_rows: torch.Tensor | None
    num_drafts: np.ndarray | None
    drafts: torch.Tensor
    padding: Padding | None
    wanted_rows: torch.Tensor | None
    stream: torch.Tensor | None = None

    @property
    def entering(self) -> torch.Tensor:
        """What enters this rank's layers."""
        return self.token_ids if self.stream is None else self.stream


@dataclass
class _Layout:
    """Which request has which rows: all of a step's inputs that do not change while it decodes.

    Attributes:
        key: the padding and bytes of the plan's arrays that it was made from.
        inputs: the step's inputs, views of the batch's buffers that each step fills anew.
        sampling: int64 `[m]` of the requests that sample, None where all do.
        drafts: int64 `[m]`, their drafts, None where nobody has any.
    """

    key: tuple[Padding | None, bytes]
    inputs: StepInputs
    sampling: torch.Tensor | None
    drafts: torch.Tensor | None


class InputBatch:
    """Owns the tables, one row per slot: known tokens, tokens computed, and block tables.

    A sampled token is written by the device itself, so the next step can be launched before the host
    has seen it; the host only sends what it alone knows (admissions, new blocks, the step's shape).

    Attributes:
        stream: `[max_rows, hidden_size]`, where rows from another pipeline stage come in; None: none do.
    """

    stream: torch.Tensor | None = None

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_rows: int,
        groups: list[KVGroup],
        device: torch.device,
        cascades: Sequence[bool] = (),
    ):
        """Allocate the tables.

        Args:
            max_num_seqs: slots.
            max_model_len: tokens of the longest context.
            max_rows: most rows of a step.
            groups: KV groups, one block table each.
            device: where the tables lie.
            cascades: per KV group, whether attention can read once what all requests of a step share; ():
                it cannot.
        """
        self.device = device
        self.max_model_len = max_model_len
        self.max_rows = max_rows
        self.block_size = groups[0].format.block_size
        self._kernels = batch_kernels(device.type)
        columns = -(-max_model_len // self.block_size)
        # One slot more than there are: padding's, where nothing is ever computed.
        self._padding_slot = max_num_seqs
        slots = max_num_seqs + 1
        self.token_table = _zeros((slots, max_model_len), torch.int32, device)
        self.num_computed = _zeros((slots,), torch.int64, device)
        self.block_tables = [_zeros((slots, columns), torch.int32, device) for _ in groups]
        self.prompt_len = np.zeros(max_num_seqs, np.int64)  # on the host, which alone asks
        # What a step reads lies at the same addresses in every step (as device graphs need it).
        self._token_ids = _zeros((max_rows,), torch.int32, device)
        self._positions = _zeros((max_rows,), torch.int64, device)
        self._slot_mappings = [_zeros((max_rows,), torch.int64, device) for _ in groups]
        self._block_rows = [_zeros((max_num_seqs, columns), torch.int32, device) for _ in groups]
        self._slots = _zeros((max_num_seqs,), torch.int64, device)
        self._append_slots = _zeros((max_num_seqs,), torch.int64, device)
        self._starts = _zeros((max_num_seqs + 1,), torch.int32, device)
        self._ends = _zeros((max_num_seqs,), torch.int64, device)
        self._drafts = _zeros((max_num_seqs,), torch.int64, device)
        self._seq_lens = _zeros((max_num_seqs,), torch.int32, device)
        self._layout: _Layout | None = None
        self._cascades = cascades if any(cascades) else ()
        self._shared_format = next(
            (g.format for g, c in zip(groups, self._cascades, strict=False) if c), None
        )
        self._shared_len = _zeros((1,), torch.int32, device)
        self._shared_tokens = 0  # what is in there

    def apply(self, plan: StepPlan) -> None:
        """Enter admissions and new blocks; one transfer for each kind."""
        if plan.admissions:
            slots = np.array([a.slot for a in plan.admissions])
            lengths = np.array([len(a.token_ids) for a in plan.admissions])
            places = np.repeat(slots * self.max_model_len - np.cumsum(lengths) + lengths, lengths)
            places += np.arange(len(places))
            tokens = np.concatenate([a.token_ids for a in plan.admissions])
            computed = np.array([a.num_computed for a in plan.admissions])
            d_places, d_tokens, d_slots, d_computed = self._send(places, tokens, slots, computed)
            self.token_table.view(-1)[d_places] = d_tokens.int()
            self.num_computed[d_slots] = d_computed
            self.prompt_len[slots] = [a.prompt_len for a in plan.admissions]
        for group, table in enumerate(self.block_tables):
            update = plan.block_updates[group]
            rows = [np.full(len(a.block_ids[group]), a.slot) for a in plan.admissions]
            columns = [np.arange(len(a.block_ids[group])) for a in plan.admissions]
            blocks = [np.asarray(a.block_ids[group], np.int64) for a in plan.admissions]
            if len(update.slots):
                rows, columns, blocks = (
                    [*rows, update.slots],
                    [*columns, update.columns],
                    [*blocks, update.blocks],
                )
            if rows:
                places = np.concatenate(rows).astype(np.int64) * table.shape[1] + np.concatenate(columns)
                ids = np.concatenate(blocks)
                # Nobody reads the others before a window: the table keeps ids that are stale, but valid.
                held = ids >= 0
                if not held.all():
                    places, ids = places[held], ids[held]
                d_places, d_blocks = self._send(places, ids)
                table.view(-1)[d_places] = d_blocks.int()
        if plan.draft_tokens is not None:
            self._enter_drafts(plan)

    def _enter_drafts(self, plan: StepPlan) -> None:
        """Write drafts that the host proposed behind the known tokens of their requests."""
        assert plan.num_drafts is not None and plan.draft_tokens is not None
        counts = plan.num_drafts.astype(np.int64)
        # Such a plan is made when all is known, so that its `start` is exact.
        first = plan.slots * np.int64(self.max_model_len) + plan.start + plan.num_rows - counts
        places = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(len(plan.draft_tokens))
        d_places, d_tokens = self._send(places, plan.draft_tokens)
        self.token_table.view(-1)[d_places] = d_tokens.int()

    def layout(self, plan: StepPlan, padding: Padding | None = None) -> StepInputs:
        """The step's inputs, not yet filled: views of the batch's buffers, which the next step reuses.

        Args:
            plan: the step.
            padding: what to pad it to; None: nothing.
        """
        key = (padding, plan.slots.tobytes() + plan.num_rows.tobytes() + plan.samples.tobytes())
        if plan.num_drafts is not None:
            key = (padding, key[1] + plan.num_drafts.tobytes())
        if self._layout is None or self._layout.key != key:
            self._layout = self._make_layout(plan, key)
        inputs = self._layout.inputs
        inputs.max_seq_len = int((plan.start + plan.num_rows).max())
        prompts = _long_prompts(plan) if inputs.meta[0].max_query_len >= LONG_PROMPT else ()
        for meta in inputs.meta:
            meta.max_seq_len, meta.plan, meta.prompts = inputs.max_seq_len, None, prompts
        if self._shared_format is not None:
            shared = self._share(plan, self._shared_format)
            for meta, cascades in zip(inputs.meta, self._cascades, strict=True):
                meta.shared_blocks = shared if cascades else 0
        return inputs

    def _share(self, plan: StepPlan, fmt: KVFormat) -> int:
        """Blocks that the step attends to once for all requests (0: none); their tokens go to the device."""
        tokens = plan.shared_blocks * self.block_size
        if not pays_to_share(len(plan.slots), tokens, fmt):
            return 0
        if tokens != self._shared_tokens:
            # After the steps before in the stream; a number needs no memory that the host would have to keep.
            self._shared_len.fill_(tokens)
            self._shared_tokens = tokens
        return plan.shared_blocks

    def widened(self, inputs: StepInputs) -> list[AttentionMetadata]:
        """`inputs.meta` on a CPU for as many requests as the step's rows may belong to: those beyond its own
        have no rows. What reads it serves every other step of so many rows, too."""
        most = min(inputs.meta[0].num_rows, len(self._slots))
        return [
            replace(
                meta,
                query_start=self._starts[: most + 1],
                seq_lens=self._seq_lens[:most],
                block_table=rows[:most],
                num_requests=most,
            )
            for meta, rows in zip(inputs.meta, self._block_rows, strict=True)
        ]

    def fill(self, inputs: StepInputs) -> None:
        """Gather the inputs from the tables as they are when the device gets there; count the rows."""
        columns = -(-inputs.meta[0].max_seq_len // self.block_size)
        self._kernels.gather_rows(
            inputs.slots,
            inputs.starts,
            self.num_computed,
            self.token_table,
            inputs.token_ids,
            inputs.positions,
            inputs.ends,
            inputs.meta[0].seq_lens,
        )
        for meta, table in zip(inputs.meta, self.block_tables, strict=True):
            self._kernels.map_blocks(
                inputs.slots,
                inputs.starts,
                inputs.ends,
                table,
                self.block_size,
                columns,
                meta.block_table,
                meta.slot_mapping,
            )

    def append(self, inputs: StepInputs, ends: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append one token (int32 `[m]`) to each request that sampled, after its `sample_ends`."""
        self._kernels.append_tokens(inputs.sample_slots, ends, tokens, self.token_table)

    def append_all(self, inputs: StepInputs, tokens: torch.Tensor) -> None:
        """Append one token (int32 `[size]`, one per request, padding included) to each that samples."""
        self._kernels.append_tokens(self._append_slots[: len(tokens)], inputs.ends, tokens, self.token_table)

    def append_judged(
        self, inputs: StepInputs, known: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        """Append what stands after drafts were judged; drafts that don't stand are not computed any more.

        Args:
            known: int64 `[m]`, as `sample_ends`.
            tokens: int32 `[m, k + 1]`: a request with fewer than k drafts has its last token in the columns
                that are too many.
            num_tokens: int32 `[m]`, how many leading ones of them stand.
        """
        assert self._layout is not None and self._layout.drafts is not None
        column = torch.arange(tokens.shape[1], device=tokens.device)
        place = known[:, None] + torch.minimum(column[None], self._layout.drafts[:, None])
        # Entries behind the tokens that stand are nobody's yet.
        self.token_table[inputs.sample_slots[:, None], place] = tokens
        self.num_computed[inputs.sample_slots] = known - 1 + num_tokens

    def take_in(
        self, slots: np.ndarray, known: np.ndarray, received: torch.Tensor, drafts: np.ndarray | None
    ) -> None:
        """Append tokens that another pipeline stage has sampled.

        Args:
            slots: int64 `[m]`.
            known: int64 `[m]`, tokens before these.
            received: int32 `[m, k]` on the device; with drafts the last column is how many of a row stand.
            drafts: int64 `[m]`, how many the step judged; None: nobody had any, and k is 1.
        """
        if drafts is None:
            (places,) = self._send(slots * self.max_model_len + known)
            self.token_table.view(-1)[places] = received[:, 0]
            return
        own, first, most = self._send(slots, known, drafts)
        column = torch.arange(received.shape[1] - 1, device=received.device)
        place = first[:, None] + torch.minimum(column[None], most[:, None])
        self.token_table[own[:, None], place] = received[:, :-1]
        self.num_computed[own] = first - 1 + received[:, -1]

    def sample_ends(self, inputs: StepInputs) -> torch.Tensor:
        """int64 `[m]`, tokens known to each request that samples (drafts are not)."""
        layout = self._layout
        sampling = layout.sampling if layout is not None else None
        ends = (
            inputs.ends[: inputs.num_requests] if sampling is None else inputs.ends.index_select(0, sampling)
        )
        return ends if layout is None or layout.drafts is None else ends - layout.drafts

    def _make_layout(self, plan: StepPlan, key: tuple[Padding | None, bytes]) -> _Layout:
        n, rows, most = len(plan.slots), plan.total_rows, int(plan.num_rows.max())
        padded = key[0] or Padding(n, rows, most)
        size, total = padded.requests, padded.rows
        padding = size - n
        starts = np.concatenate(([0], np.cumsum(plan.num_rows, dtype=np.int64), np.full(padding, rows)))
        sample_requests = np.flatnonzero(plan.samples)
        everyone = len(sample_requests) == n
        slots = np.concatenate((plan.slots, np.full(padding, self._padding_slot)))
        drafts = None if plan.num_drafts is None else plan.num_drafts[sample_requests]
        ends = starts[sample_requests + 1]
        if drafts is None:
            last, counts = ends - 1, np.zeros(0, np.int64)
        else:
            counts = drafts.astype(np.int64)
            last = np.repeat(ends - np.cumsum(counts + 1), counts + 1)
            last += np.arange(len(last))
        judged = np.zeros(n, np.int64) if plan.num_drafts is None else plan.num_drafts
        slots_d, append_d, starts_d, sampling_d, last_d, drafts_d, judged_d = self._send(
            slots,
            slots
            if everyone
            else np.where(np.append(plan.samples, [True] * padding), slots, self._padding_slot),
            starts,
            sample_requests,
            last,
            counts,
            np.append(judged, np.zeros(padding, np.int64)),
        )
        self._drafts[:size].copy_(judged_d)
        self._slots[:size].copy_(slots_d)
        self._append_slots[:size].copy_(append_d)
        self._starts[: size + 1].copy_(starts_d)
        if self.device.type == "cpu":
            self._starts[size + 1 :].fill_(total)  # for `widened`
        for mapping in self._slot_mappings:
            mapping[rows:total].fill_(-1)
        slots_view, seq_lens = self._slots[:size], self._seq_lens[:size]
        inputs = StepInputs(
            token_ids=self._token_ids[:total],
            positions=self._positions[:total],
            meta=[
                AttentionMetadata(
                    query_start=self._starts[: size + 1],
                    seq_lens=seq_lens,
                    block_table=block_rows[:size],
                    slot_mapping=mapping[:total],
                    num_requests=size,
                    num_rows=total,
                    max_query_len=padded.most,
                    max_seq_len=0,
                    num_decodes=size if padded.most == 1 else self._num_decodes(plan, key[0]),
                    shared_len=self._shared_len,
                )
                for block_rows, mapping in zip(self._block_rows, self._slot_mappings, strict=True)
            ],
            slots=slots_view,
            starts=self._starts[: size + 1],
            ends=self._ends[:size],
            num_requests=n,
            max_seq_len=0,
            sample_requests=sample_requests,
            sample_slots=slots_view[:n] if everyone else slots_d[sampling_d],
            num_sample_rows=len(last),
            sample_rows=None if rows == len(last) else last_d,
            num_drafts=drafts,
            drafts=self._drafts[:size],
            padding=key[0],
            wanted_rows=None if rows in (n, len(last)) else last_d if len(last) else starts_d[1:2] - 1,
            stream=None if self.stream is None else self.stream[:total],
        )
        return _Layout(key, inputs, None if everyone else sampling_d, None if drafts is None else drafts_d)

    @staticmethod
    def _num_decodes(plan: StepPlan, padding: Padding | None) -> int:
        """See `AttentionMetadata`. A padded step's launches serve others, which have other rows."""
        return int((plan.num_rows == 1).sum()) if padding is None else 0

    def _send(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Integer arrays to the device as int64, in one transfer that nobody waits for."""
        packed = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
        if self.device.type != "cpu":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        return packed.split([len(a) for a in arrays])


def _long_prompts(plan: StepPlan) -> tuple[tuple[int, int, int], ...]:
    """See `AttentionMetadata.prompts`."""
    many = np.flatnonzero(plan.num_rows > 1)
    rows = plan.num_rows[many]
    if plan.start[many].any() or rows.min() < LONG_PROMPT:
        return ()
    first = np.cumsum(plan.num_rows) - plan.num_rows
    return tuple(zip(many.tolist(), first[many].tolist(), rows.tolist(), strict=True))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        # NumPy's zeros cost no memory until they are written; PyTorch's do.
        return torch.from_numpy(np.zeros(shape, np.int32 if dtype == torch.int32 else np.int64))
    return torch.zeros(shape, dtype=dtype, device=device)
