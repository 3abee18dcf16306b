"""Paged attention: the metadata all backends read, the interface they implement, the plain version.

A step is one ragged batch: request i owns rows `query_start[i] .. query_start[i+1]`; its context
is `seq_lens[i]` tokens, of which its rows are the last ones. A decode token, a prefill chunk and
a verification of drafts differ only in how many rows they have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo.kernels import ops, reference_kv

if TYPE_CHECKING:
    from octavo.kv.format import KVFormat


# Tokens from which a prompt computed in one step is worth telling backends of.
LONG_PROMPT = 1024

# From what on it pays to attend to a shared beginning once for all requests. In each layer it saves reading
# the keys and values of `requests - 1` beginnings, and costs a launch (3 µs) and partial results in float32,
# written and read through the L2 (17 to 34 MB for a full device: 3 to 6 µs). At an H200's 4.3 TB/s these are
# 26 to 39 MB. A beginning that fits the L2 is read from there already by all requests but the first, whose
# programs run at the same time; but that is hardly faster (5.5 TB/s or so): 64 requests of 4096 shared tokens
# of Llama-8B read 1.1 GB a layer, 0.2 ms. It does for two or three requests, which read no more than the L2
# delivers while the memory fills it.
MIN_SHARED_BYTES = 32 << 20
MIN_SHARED_REQUESTS = 4
MIN_SHARED_TOKENS = 128  # whole tiles of positions: see octavo.kernels.triton.cascade


def pays_to_share(requests: int, tokens: int, fmt: KVFormat) -> bool:
    """Whether attending to a beginning of `tokens` once for so many requests beats doing it for each."""
    saved = (requests - 1) * (tokens // fmt.block_size) * fmt.layer_block_bytes()
    return requests >= MIN_SHARED_REQUESTS and tokens >= MIN_SHARED_TOKENS and saved >= MIN_SHARED_BYTES


@dataclass
class AttentionMetadata:
    """One step's batch as attention sees it, for one KV group. All tensors on the model's device.

    Attributes:
        query_start: int32 `[n + 1]`, first row of each request; the last entry is the row count.
        seq_lens: int32 `[n]`, context length of each request, this step's rows included.
        block_table: int32 `[n, max_blocks]`, block ids in order; entries past a request's length
            are arbitrary but valid ids.
        slot_mapping: int64 `[rows]`, where each row's K and V go:
            `block_id * block_size + offset`; -1 drops the row (padding).
        num_requests: n.
        num_rows: rows of the step.
        max_query_len: host's upper bound of a request's rows (1: pure decode).
        max_seq_len: host's upper bound of `seq_lens`.
        num_decodes: how many leading requests have exactly one row; a hint, 0 is always right.
        prompts: (request, first row, rows) of the requests with more than one row, if all of these are
            whole prompts (their rows are their contexts) of at least `LONG_PROMPT` tokens; a hint, () is
            always right.
        wanted_rows: int64 `[m]`, the rows whose hidden states the step reads, in order: a model returns
            these alone; None: all. Stands in the first KV group's entry.
        shared_blocks: how many leading entries of the block table are the same for all requests (those
            without rows aside), if attending to these blocks once for all is worth it; each request had more
            tokens than they hold before its rows. A hint, 0 is always right.
        shared_len: int32 `[1]`, tokens of these blocks; read only where there are some, so that a recorded
            graph serves any number.
        plan: whatever the backend's `plan` prepared for this step.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_requests: int
    num_rows: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int = 0
    prompts: tuple[tuple[int, int, int], ...] = ()
    wanted_rows: torch.Tensor | None = None
    shared_blocks: int = 0
    shared_len: torch.Tensor | None = None
    plan: object = None


class QKV(NamedTuple):
    """A step's rows as a layer's products yield them, and how their heads are normalized and rotated.

    Attributes:
        q: `[rows, num_heads, head_dim]`. It, `k` and `v` may be views of one product, and may be overwritten.
        k, v: `[rows, num_kv_heads, head_dim]`.
        cos_sin: float32 `[max_position, rotary_dim]`, cosines in the first half, then sines.
        positions: int64 `[rows]`.
        q_weight, k_weight: of the norms of each head before the rotation (Qwen3's): `[head_dim]` each, of
            `q`'s dtype or float32 (see `reference.rms_norm`), or both None.
        eps: of the norms.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6


class PagedBackend(ABC):  # noqa: B024 (what is abstract differs between kinds of attention)
    """What any attention over a paged cache does once per step, for all layers of a KV group.

    Attributes:
        name: for settings and the log.
        recordable: whether its steps can be part of a device graph; one that says so overrides the
            hooks of capture and replay.
        cascades: whether it minds `AttentionMetadata.shared_blocks`.
    """

    name: str
    recordable: bool = False
    cascades: bool = False

    def plan(self, meta: AttentionMetadata) -> None:  # noqa: B027 (optional hook)
        """Prepare the step's schedule once, before the first layer (fills `meta.plan`)."""

    def prepare_capture(self, meta: AttentionMetadata) -> None:
        """Make `meta` safe to record in a device graph (fixed shapes and addresses)."""
        raise NotImplementedError(f"{self.name} attention cannot be captured in a graph")

    def prepare_replay(self, meta: AttentionMetadata) -> None:
        """Refresh what a recorded graph reads, before it is replayed on `meta`."""
        raise NotImplementedError(f"{self.name} attention cannot be captured in a graph")


class AttentionBackend(PagedBackend):
    """How attention over the paged cache is computed on one kind of device.

    The cache of a layer is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, of int8 codes the heads'
    pieces with their scales (`KVFormat`). A backend holds no per-request state: everything it reads is in the
    metadata.

    Attributes:
        kv_scale: of an FP8 cache float32 `[2, num_kv_heads]` on its device, what the codes of keys and of
            values are multiplied by: the layer's own (`Attention.kv_scale`), whose address never changes.
            None with every other cache.
        kv_centre: float32 `[num_kv_heads, head_dim]`, what keys of 8 bits are stored less of: the layer's own
            (`Attention.kv_centre`), whose address never changes. None: keys are stored as they are. Readers
            of the cache need not know it: scores of a row all change by the same number.

    Under a sliding window it reads no block that lies wholly before the windows of all of a request's
    rows: such blocks may have been given to other requests, and hold anything.

    Args:
        num_heads: query heads of this rank.
        fmt: of the cache.
        scale: factor of the scores.
        sliding_window: a row sees itself and the `sliding_window - 1` tokens before it; None: all.
        softcap: scaled scores become `softcap * tanh(scores / softcap)` before the mask and the softmax
            (Gemma 2, arXiv 2408.00118); None: they stay.
    """

    kv_scale: torch.Tensor | None = None
    kv_centre: torch.Tensor | None = None

    def __init__(
        self,
        num_heads: int,
        fmt: KVFormat,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ):
        self.num_heads = num_heads
        self.fmt = fmt
        self.scale = scale
        self.sliding_window = sliding_window
        self.softcap = softcap

    @abstractmethod
    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        """Store rows `k`, `v` (`[rows, num_kv_heads, head_dim]`) at `meta.slot_mapping`."""

    def rotary_and_write_kv(self, qkv: QKV, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Normalize each head of `q` and `k` (if weights are given), rotate them, store `k` and `v`.

        Returns the `q` to attend with. Override it where one kernel does all of it.
        """
        q, k, v, cos_sin, positions, q_weight, k_weight, eps = qkv
        if q_weight is not None and k_weight is not None:
            q, k = ops.rms_norm(q, q_weight, eps), ops.rms_norm(k, k_weight, eps)
        ops.rotary(q, k, cos_sin, positions)
        self.write_kv(k, v, cache, meta)
        return q

    def rotate_and_attend(self, qkv: QKV, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """`rotary_and_write_kv` and `attend`: `[rows, num_heads, head_dim]`. Override it where one kernel
        does all of it."""
        return self.attend(self.rotary_and_write_kv(qkv, cache, meta), cache, meta)

    @abstractmethod
    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Causal attention of rows `q` (`[rows, num_heads, head_dim]`) over their contexts.

        KV of this step's rows is already in the cache. Returns `[rows, num_heads, head_dim]`.
        """


class TorchAttention(AttentionBackend):
    """Plain PyTorch: gathers each request's context and computes softmax(q k^T) v in float32.

    Slow and simple: the oracle that the fast backends are tested against.
    """

    name = "torch"

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        slots = meta.slot_mapping
        kept = slots >= 0
        if not bool(kept.all()):
            slots, k, v = slots[kept], k[kept], v[kept]
        fmt = self.fmt
        for part, x in enumerate((k, v)):
            centre = self.kv_centre if part == 0 else None
            if fmt.dtype == "int8":
                reference_kv.write_int8(x, cache, part, slots, fmt.block_size, fmt.offset, centre)
                continue
            if fmt.quantized:
                assert self.kv_scale is not None
                x = reference_kv.quantize_fp8(x, fmt.dtype, self.kv_scale[part], centre)
            cache[slots // fmt.block_size, part, :, slots % fmt.block_size] = x.to(cache.dtype)

    def _values(self, blocks: torch.Tensor) -> torch.Tensor:
        """float32 `[n, 2, num_kv_heads, block_size, head_dim]` of n blocks of a cache."""
        fmt = self.fmt
        if fmt.dtype == "int8":
            return reference_kv.dequantize_int8(blocks, fmt.block_size, fmt.head_dim, fmt.offset)
        if not fmt.quantized:
            return blocks.float()
        assert self.kv_scale is not None
        parts = zip(blocks.unbind(1), self.kv_scale, strict=True)
        return torch.stack([reference_kv.dequantize_fp8(x, fmt.dtype, scale) for x, scale in parts], 1)

    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        out = torch.empty_like(q)
        starts, lens = meta.query_start.tolist(), meta.seq_lens.tolist()
        group = self.num_heads // self.fmt.num_kv_heads
        for i in range(meta.num_requests):
            lo, hi, ctx = starts[i], starts[i + 1], lens[i]
            # The first position that any row sees: what lies before it is not read at all.
            low = 0
            if self.sliding_window is not None:
                low = max(0, ctx - (hi - lo) - self.sliding_window + 1)
            first = low // self.fmt.block_size
            blocks = meta.block_table[i, first : -(-ctx // self.fmt.block_size)].long()
            kv = self._values(cache[blocks]).permute(1, 2, 0, 3, 4).flatten(2, 3)
            kv = kv[:, :, low - first * self.fmt.block_size : ctx - first * self.fmt.block_size]
            k, v = (x.repeat_interleave(group, dim=0) for x in kv)
            scores = torch.einsum("rhd,htd->hrt", q[lo:hi].float(), k) * self.scale
            if self.softcap is not None:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            row = torch.arange(ctx - (hi - lo), ctx, device=q.device)[:, None]
            col = torch.arange(low, ctx, device=q.device)[None, :]
            mask = col > row
            if self.sliding_window is not None:
                mask |= col <= row - self.sliding_window
            probs = scores.masked_fill(mask, float("-inf")).softmax(-1)
            out[lo:hi] = torch.einsum("hrt,htd->rhd", probs, v).to(q.dtype)
        return out
