"""Random ragged batches over a paged cache, and attention over them in float64."""

from __future__ import annotations

import torch

from octavo.kernels import reference_kv
from octavo.kv.format import KVFormat
from octavo.layers.attention import AttentionMetadata


def ragged_batch(
    shapes: list[tuple[int, int]],
    heads: int,
    fmt: KVFormat,
    device: str = "cpu",
    seed: int = 0,
    num_decodes: int = 0,
    spare_table: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Queries, cache and metadata of requests of (rows, context length).

    Cache positions that no context owns hold NaN, and so do the blocks that spare table entries name.
    """
    g = torch.Generator(device="cpu").manual_seed(seed)
    dtype = getattr(torch, fmt.dtype)
    size = fmt.block_size
    counts = [-(-context // size) for _, context in shapes]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=g)
    cache = torch.full((num_blocks, *fmt.layer_block_shape()), float("nan"))
    width = max(counts) + spare_table
    table = order[-1].repeat(len(shapes), width)
    slots, used = [], 0
    for i, ((rows, context), count) in enumerate(zip(shapes, counts, strict=True)):
        blocks = order[used : used + count]
        used += count
        table[i, :count] = blocks
        position = torch.arange(context)
        slot = blocks[position // size] * size + position % size if context else position
        kv = torch.randn(context, *fmt.layer_block_shape()[:2], fmt.head_dim, generator=g)
        cache[slot // size, :, :, slot % size] = kv
        slots.append(slot[context - rows :])
    starts = torch.tensor([0] + [rows for rows, _ in shapes]).cumsum(0)
    rows = int(starts[-1])
    q = torch.randn(rows, heads, fmt.head_dim, generator=g)
    meta = AttentionMetadata(
        query_start=starts.int().to(device),
        seq_lens=torch.tensor([context for _, context in shapes], dtype=torch.int32, device=device),
        block_table=table.int().to(device),
        slot_mapping=torch.cat(slots).to(device),
        num_requests=len(shapes),
        num_rows=rows,
        max_query_len=max(rows for rows, _ in shapes),
        max_seq_len=max(context for _, context in shapes),
        num_decodes=num_decodes,
    )
    return q.to(device, dtype), cache.to(device, dtype), meta


def share_beginning(cache: torch.Tensor, meta: AttentionMetadata, blocks: int) -> None:
    """Lets all requests begin with the first one's blocks, and says so; NaN in those that they had there."""
    table = meta.block_table[:, :blocks]
    left = meta.seq_lens - meta.query_start.diff()
    assert bool((left >= blocks * cache.shape[3])[meta.query_start.diff() > 0].all()), (
        "blocks that rows are in"
    )
    cache[table[1:].flatten().long()] = float("nan")
    table[1:] = table[0]
    meta.shared_blocks = blocks
    meta.shared_len = torch.tensor([blocks * cache.shape[3]], dtype=torch.int32, device=cache.device)


def forget_before_window(cache: torch.Tensor, meta: AttentionMetadata, window: int) -> int:
    """What becomes of blocks that lie wholly before the windows of all of a request's rows: NaN in them,
    and their table entries name another block of NaN. Returns how many there were."""
    size, forgotten = cache.shape[3], 0
    rows = meta.query_start.diff().tolist()
    nowhere = meta.block_table.flatten()[-1]  # a spare entry: see ragged_batch
    assert bool(cache[int(nowhere)].isnan().all())
    for i, context in enumerate(meta.seq_lens.tolist()):
        left = max(0, context - rows[i] - window + 1) // size
        cache[meta.block_table[i, :left].long()] = float("nan")
        meta.block_table[i, :left] = nowhere
        forgotten += left
    return forgotten


def attention_float64(
    q: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of every row by itself, in float64."""
    q, cache = q.double(), cache.double()
    heads, kv_heads, size = q.shape[1], cache.shape[2], cache.shape[3]
    starts, lens, table = meta.query_start.tolist(), meta.seq_lens.tolist(), meta.block_table.long()
    out = torch.zeros_like(q)
    for i in range(meta.num_requests):
        for row in range(starts[i], starts[i + 1]):
            last = lens[i] - (starts[i + 1] - row)
            first = 0 if window is None else max(0, last - window + 1)
            position = torch.arange(first, last + 1, device=q.device)
            kv = cache[table[i, position // size], :, :, position % size]  # [positions, 2, kv_heads, dim]
            kv = kv.repeat_interleave(heads // kv_heads, dim=2)
            scores = torch.einsum("hd,phd->hp", q[row], kv[:, 0]) * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            out[row] = torch.einsum("hp,phd->hd", scores.softmax(-1), kv[:, 1])
    return out


def kv_scales(cache: torch.Tensor, kind: str) -> torch.Tensor | None:
    """Scales of an FP8 cache that holds the values of `cache`, where these are no NaN: the largest are a bit
    out of range. None of other kinds."""
    if kind == "int8":
        return None
    largest = cache.float().nan_to_num(nan=0.0).abs().amax((0, 3, 4))
    return (largest / (1.05 * reference_kv.FP8_LARGEST[kind])).contiguous()


def quantize_cache(
    cache: torch.Tensor, kind: str, offset: bool = False, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache `[num_blocks, 2, kv_heads, block_size, head_dim]` quantized by the plain twins, and the values
    that it then has (float32). What is NaN has codes 0x7f, and of INT8 scales and offsets of NaN."""
    blocks, _, heads, size, dim = cache.shape
    cache, nothing = cache.float(), cache.isnan()
    if kind != "int8":
        assert scale is not None
        parts = [
            reference_kv.quantize_fp8(cache[:, p].transpose(1, 2).flatten(0, 1), kind, scale[p])
            .unflatten(0, (blocks, size))
            .transpose(1, 2)
            for p in (0, 1)
        ]
        codes = torch.stack(parts, 1).masked_fill(nothing, 0x7F)
        values = [reference_kv.dequantize_fp8(codes[:, p], kind, scale[p]) for p in (0, 1)]
        return codes, torch.stack(values, 1)
    fmt = KVFormat(kind, size, heads, dim, offset=offset)
    codes = torch.full((blocks, *fmt.layer_block_shape()), 0x7F, dtype=torch.uint8, device=cache.device)
    codes[..., size * dim :].view(torch.float16).fill_(float("nan"))
    slots = torch.arange(blocks * size, device=cache.device)
    for part in (0, 1):
        rows = cache[:, part].transpose(1, 2).flatten(0, 1)
        there = ~rows.isnan().flatten(1).any(1)
        reference_kv.write_int8(rows[there], codes, part, slots[there], size, offset)
    return codes, reference_kv.dequantize_int8(codes, size, dim, offset)
