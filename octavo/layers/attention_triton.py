"""Attention on NVIDIA GPUs: Triton kernels over the paged cache, ready for CUDA graphs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.kernels.triton import attention as kernels
from octavo.kernels.triton import attention_tiles, cascade, rotary_kv, rotary_row
from octavo.kernels.triton.kv_codes import KVCodes
from octavo.kernels.triton.kv_encode import gather_kv
from octavo.kernels.triton.launch import power_of_2
from octavo.kernels.triton.workspace import workspace
from octavo.layers.attention import QKV, AttentionBackend, AttentionMetadata

if TYPE_CHECKING:
    from octavo.kv.format import KVFormat


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device runs beside each other, at least."""
    if device.type != "cuda":
        return 4  # Triton's interpreter: any small number
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True)
class _Decode:
    """One launch of the decode kernel: requests `first .. last` of at most `max_rows` rows each."""

    first: int
    last: int
    max_rows: int
    splits: int
    floats: int  # of `partials`, that it uses
    partials: torch.Tensor
    counters: torch.Tensor
    few: bool  # the device runs all its programs at a time
    apart: bool  # what splits come to is added up by a kernel of its own


@dataclass(frozen=True)
class _Plan:
    """Launches of a layer: what all requests share, then decode kernels, then cuDNN on `prompts`, or the
    prefill kernel on what remains."""

    decodes: tuple[_Decode, ...]
    prefill_from: int
    prefill_rows: int
    prompts: tuple[tuple[int, int, int], ...] = ()
    shared: kernels.SharedPass | None = None
    angles: dict[int, torch.Tensor] = field(default_factory=dict)

    def angles_of(self, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The rows' own rows of a rotary table, gathered once a step: in every layer that is one access to
        memory fewer of those that wait for each other. The gathering is a kernel of PyTorch's, which begins
        when the step's metadata is complete: attention behind it reads that early (`paged_decode`)."""
        key = cos_sin.data_ptr()
        if key not in self.angles:
            self.angles[key] = cos_sin.index_select(0, positions)
        return self.angles[key]


class RecordableAttention(AttentionBackend):
    """What attention by Triton kernels has in common: how rows are stored, and that a recorded graph needs
    nothing but what its metadata's tensors hold.

    Over a quantized cache, queries of any dtype and probabilities become float16 to be multiplied with codes,
    and sums are float32.
    """

    recordable = True

    @functools.cached_property
    def codes(self) -> KVCodes | None:
        """How kernels read a quantized cache, once `kv_scale` is set; None: it is not quantized."""
        fmt = self.fmt
        if not fmt.quantized:
            return None
        assert (self.kv_scale is None) == (fmt.dtype == "int8"), "scales belong to FP8 caches"
        sizes = (fmt.block_size, fmt.head_dim)
        return KVCodes(fmt.dtype, *sizes, fmt.offset, self.kv_scale, centre=self.kv_centre)

    @property
    def product_dtype(self) -> torch.dtype:
        """Of the kernels' matrix products."""
        return torch.float16 if self.fmt.quantized else getattr(torch, self.fmt.dtype)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        rotary_kv.write_kv(k, v, cache, meta.slot_mapping, self.codes)

    def prepare_capture(self, meta: AttentionMetadata) -> None:
        # Grids come from the host's bounds in `meta`, which the recorded launches keep.
        self.plan(meta)

    def prepare_replay(self, meta: AttentionMetadata) -> None:
        # Everything that changes is read from the metadata's tensors.
        pass


class TritonAttention(RecordableAttention):
    """Paged attention by `octavo.kernels.triton.attention`, for bfloat16, float16 and float32,
    and over quantized caches of all kinds.

    The leading `meta.num_decodes` requests (one row each) go to the decode kernel; so do the others
    if they have few rows (drafts to verify), and else to the prefill kernel: one launch for a pure
    batch, two for a mixed one. Which launches, and their grids, follow from the metadata's host
    fields alone. A graph recorded on a metadata therefore serves every step that is copied into that
    metadata's tensors and stays within its bounds; requests added as padding have no rows
    (`query_start[i] == query_start[i + 1]`), and their output rows are left unwritten.

    Where all requests go to the decode kernel and begin with the same blocks (`meta.shared_blocks`), one
    launch before it attends to these for all of them (cascade attention). A recorded graph has that launch
    or not, and serves every length of it.

    Long prompts that a step computes whole have no context in the cache beside their own rows: where it
    can, cuDNN's attention serves them, whose kernels for Hopper do twice the operations a second.
    """

    name = "triton"

    def __init__(
        self,
        num_heads: int,
        fmt: KVFormat,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ):
        super().__init__(num_heads, fmt, scale, sliding_window, softcap)
        self.group = num_heads // fmt.num_kv_heads
        self.dtype = self.product_dtype
        self.max_decode_tile = attention_tiles.max_decode_tile(self.dtype)
        self.cascades = sliding_window is None and self._fits_decode(1)

    def _fits_decode(self, max_query_len: int) -> bool:
        return power_of_2(max_query_len) * self.group <= self.max_decode_tile

    def _decode(self, meta: AttentionMetadata, first: int, last: int, max_query_len: int) -> _Decode:
        device = meta.seq_lens.device
        max_rows = power_of_2(max_query_len)
        context = meta.max_seq_len
        if self.sliding_window is not None:
            context = min(context, self.sliding_window + max_rows + self.fmt.block_size)
        requests, heads = last - first, self.fmt.num_kv_heads
        _, min_chunk, whole = kernels.decode_cut(
            requests == max_rows == 1, self.fmt.head_dim, self.dtype, self.fmt.quantized,
            kernels.shared_memory(device),
        )  # fmt: skip
        splits = kernels.choose_splits(requests * heads, context, multiprocessors(device), 2, min_chunk)
        few = requests * heads * splits <= 2 * multiprocessors(device)
        sizes = kernels.decode_workspace_sizes(
            requests, heads, self.group, self.fmt.head_dim, max_rows, splits
        )
        # A single row whose context is split late is mostly whole: a kernel more would be for nothing.
        apart = few and (max_rows > 1 or whole == 1)
        return _Decode(
            first, last, max_rows, splits, sizes[0], *workspace(device).reserve(*sizes), few, apart
        )

    def _shared(self, meta: AttentionMetadata, decodes: list[_Decode]) -> kernels.SharedPass | None:
        """The pass over what all requests share, if the decode kernel does the rest for each of them."""
        if not self.cascades or not meta.shared_blocks or meta.shared_len is None:
            return None
        if not decodes or decodes[-1].last < meta.num_requests:
            return None
        device, rows = meta.seq_lens.device, meta.num_rows
        heads, dim = self.fmt.num_kv_heads, self.fmt.head_dim
        smem = kernels.shared_memory(device)
        tile = cascade.shared_config(rows * self.group, self.group, dim, self.dtype, smem)
        # As for the contexts: a graph is planned for the longest.
        splits = cascade.shared_splits(
            rows, heads, self.group, dim, meta.max_seq_len, multiprocessors(device), tile
        )
        # Behind what the decode kernel writes itself, which begins as this is read; aligned.
        begin = -(-max(part.floats for part in decodes) // 64) * 64
        size = cascade.shared_workspace_size(rows, self.num_heads, dim, splits)
        partials = workspace(device).reserve(begin + size)[0][begin:]
        return kernels.SharedPass(meta.shared_len, rows, splits, partials, tile, cascade.MIN_CHUNK)

    def plan(self, meta: AttentionMetadata) -> None:
        n = meta.num_requests
        singles = n if meta.max_query_len == 1 else meta.num_decodes
        if not self._fits_decode(1):
            singles = 0
        decodes = []
        if singles:
            decodes.append(self._decode(meta, 0, singles, 1))
        rest = singles
        if rest < n and self._fits_decode(meta.max_query_len):
            decodes.append(self._decode(meta, rest, n, meta.max_query_len))
            rest = n
        prompts = meta.prompts if rest < n and len(meta.prompts) == n - rest else ()
        if prompts and self._by_cudnn(meta):
            meta.plan = _Plan(tuple(decodes), n, 0, prompts)
        else:
            shared = self._shared(meta, decodes)
            meta.plan = _Plan(tuple(decodes), rest, meta.num_rows - singles, shared=shared)

    def _by_cudnn(self, meta: AttentionMetadata) -> bool:
        """Whether cuDNN computes what these prompts need: two-byte types, usual heads, no cap, no window."""
        window = self.sliding_window
        return (
            meta.seq_lens.is_cuda
            and torch.cuda.get_device_capability(meta.seq_lens.device) >= (9, 0)
            and self.fmt.dtype != "float32"
            and self.fmt.head_dim in (64, 128)
            and self.softcap is None
            and (window is None or window >= meta.max_query_len)
        )

    def _attend_prompt(
        self, q: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Causal attention of a whole prompt's rows `q` over its own keys and values, into `out`."""
        rows = len(q)
        if q.dtype == torch.float32:  # over a quantized cache; cuDNN has no kernels for it
            q = q.to(self.dtype)
        if self.codes is None:
            kv = cache.index_select(0, blocks).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :rows]
        else:
            # Its own keys and values as later steps will read them: chunks and cached blocks change nothing.
            kv = gather_kv(cache, self.codes, blocks, rows, q.dtype)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], kv[:1], kv[1:], is_causal=True, scale=self.scale, enable_gqa=True
            )
        out.copy_(found[0].transpose(0, 1))

    def rotary_and_write_kv(self, qkv: QKV, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        q, k, v, cos_sin, positions, q_weight, k_weight, eps = qkv
        angles, slots = self._planned(meta).angles_of(cos_sin, positions), meta.slot_mapping
        rotary_kv.rotary_and_write_kv(
            q, k, v, angles, None, cache, slots, q_weight, k_weight, eps, self.codes
        )  # fmt: skip
        return q

    def rotate_and_attend(self, qkv: QKV, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        plan = self._planned(meta)
        # Of several requests one may read, in this step, a block that another one's row completes: rows are
        # stored before any of them is attended to.
        if meta.num_requests > 1 or len(qkv.q) > 1 or not plan.decodes or plan.shared is not None:
            return super().rotate_and_attend(qkv, cache, meta)
        q, k, v, cos_sin, positions, q_weight, k_weight, eps = qkv
        angles = plan.angles_of(cos_sin, positions)
        row = rotary_row.Unrotated(k, v, angles, meta.slot_mapping, q_weight, k_weight, eps)
        return self._attend(q, cache, meta, plan, row)

    def _planned(self, meta: AttentionMetadata) -> _Plan:
        if not isinstance(meta.plan, _Plan):
            self.plan(meta)
        plan = meta.plan
        assert isinstance(plan, _Plan)
        return plan

    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        return self._attend(q, cache, meta, self._planned(meta))

    def _attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        plan: _Plan,
        unrotated: rotary_row.Unrotated | None = None,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.shared is not None:
            cascade.attend_shared(
                q, cache, meta.query_start, meta.block_table, meta.num_requests, plan.shared, self.scale,
                self.softcap, self.codes,
            )  # fmt: skip
        for part in plan.decodes:
            kernels.paged_decode(
                q, cache, out, meta.query_start, meta.seq_lens, meta.block_table,
                part.first, part.last, part.max_rows, part.splits, part.partials, part.counters,
                self.scale, self.sliding_window, self.softcap, shared=plan.shared, codes=self.codes,
                early=bool(plan.angles) and part.few, unrotated=unrotated,
                apart=part.apart and plan.shared is None,
            )  # fmt: skip
        for request, first, rows in plan.prompts:
            blocks = meta.block_table[request, : -(-rows // self.fmt.block_size)]
            self._attend_prompt(q[first : first + rows], cache, blocks, out[first : first + rows])
        if plan.prefill_from < meta.num_requests:
            kernels.paged_prefill(
                q, cache, out, meta.query_start, meta.seq_lens, meta.block_table,
                plan.prefill_from, meta.num_requests, plan.prefill_rows,
                self.scale, self.sliding_window, self.softcap, codes=self.codes,
            )  # fmt: skip
        return out
