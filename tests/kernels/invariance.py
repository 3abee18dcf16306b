"""Checks that rows don't depend on their batch, for the interpreter and for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.kernels.triton import invariant_linear as linear
from octavo.kv.format import KVFormat
from octavo.layers.attention import AttentionMetadata
from octavo.layers.attention_invariant import InvariantAttention


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bit by bit, and without a NaN."""
    as_integers = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return not got.isnan().any() and torch.equal(got.view(as_integers), want.view(as_integers))


def check_linear(
    rows: list[int], size_in: int, size_out: int, dtype: torch.dtype, device: str, bias: bool = True
) -> None:
    """Products of some of the rows, by every tile and by the one that is chosen, against those of all."""
    g = torch.Generator().manual_seed(size_in + size_out)
    x = torch.randn(max(rows), size_in, generator=g).to(device, dtype)
    weight = torch.randn(size_out, size_in, generator=g).to(device, dtype)
    add = torch.randn(size_out, generator=g).to(device, dtype) if bias else None
    want = linear.invariant_linear(x, weight, add)
    exact = x.double() @ weight.double().T + (0 if add is None else add.double())
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    assert (want.double() - exact).norm() < bound * exact.norm()
    for count in rows:
        first = (max(rows) - count) // 3  # other places in their tiles than among all
        some = x[first : first + count]
        for tile in (None, *linear.all_tiles(dtype)):
            got = linear.invariant_linear(some, weight, add, tile)
            assert same_bits(got, want[first : first + count]), (count, tile)


class OneRequest:
    """One request's rows and context in a scrambled cache, of which a batch may compute any part.

    What the request has not yet computed is NaN in the cache, as is what no request owns.
    """

    def __init__(self, heads: int, fmt: KVFormat, length: int, device: str, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, fmt.dtype)
        self.fmt, self.heads, self.length, self.device = fmt, heads, length, device
        self.q = torch.randn(length, heads, fmt.head_dim, generator=g).to(device, dtype)
        self.kv = torch.randn(length, 2, fmt.num_kv_heads, fmt.head_dim, generator=g).to(device, dtype)
        self.blocks = -(-length // fmt.block_size)


def attend_parts(
    backend: InvariantAttention,
    requests: list[OneRequest],
    parts: list[tuple[int, int]],
    num_decodes: int = 0,
    bound: int | None = None,
    padding: int = 0,
) -> list[torch.Tensor]:
    """What a step gives that computes rows `first .. last` (exclusive) of each request.

    Args:
        bound: the host's upper bound of the contexts, if it is not the longest one.
        padding: requests without rows at the end, with a row of nobody each.
    """
    fmt, device = requests[0].fmt, requests[0].device
    total = sum(r.blocks for r in requests)
    order = torch.randperm(total + 1, generator=torch.Generator().manual_seed(total)).to(device)
    dtype = getattr(torch, fmt.dtype)
    cache = torch.full((total + 1, *fmt.layer_block_shape()), float("nan"), dtype=dtype, device=device)
    width = max(r.blocks for r in requests)
    table = order[-1].repeat(len(requests) + padding, width)
    used = 0
    for i, (request, (first, last)) in enumerate(zip(requests, parts, strict=True)):
        blocks = order[used : used + request.blocks]
        used += request.blocks
        table[i, : request.blocks] = blocks
        low = 0 if backend.sliding_window is None else max(0, first - backend.sliding_window + 1)
        position = torch.arange(low // fmt.block_size * fmt.block_size, last, device=device)
        cache[blocks[position // fmt.block_size], :, :, position % fmt.block_size] = request.kv[position]
    counts = [last - first for first, last in parts] + [0] * padding
    starts = torch.tensor([0, *counts]).cumsum(0)
    meta = AttentionMetadata(
        query_start=starts.int().to(device),
        seq_lens=torch.tensor([last for _, last in parts] + [0] * padding, dtype=torch.int32, device=device),
        block_table=table.int(),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        num_requests=len(counts),
        num_rows=int(starts[-1]) + padding,
        max_query_len=max(counts),
        max_seq_len=bound or max(last for _, last in parts),
        num_decodes=num_decodes,
    )
    q = torch.cat([r.q[first:last] for r, (first, last) in zip(requests, parts, strict=True)])
    if padding:
        q = torch.cat((q, q.new_full((padding, *q.shape[1:]), float("nan"))))
    backend.plan(meta)
    out = backend.attend(q, cache, meta)[: int(starts[-1])]
    return list(out.split(counts[: len(requests)]))


def check_attention(
    make: Callable[[], InvariantAttention],
    heads: int,
    fmt: KVFormat,
    lengths: list[int],
    chunks: list[int],
    device: str,
) -> list[tuple[OneRequest, torch.Tensor]]:
    """Every row computed as part of its whole prompt, alone; in chunks of several sizes, alone and beside
    the other requests; and as a decode token among others, padded, and under a loose bound. All must be the
    same bits. Returns each request with its rows.
    """
    backend = make()
    requests = [OneRequest(heads, fmt, n, device, seed=i) for i, n in enumerate(lengths)]
    want = [attend_parts(backend, [r], [(0, r.length)])[0] for r in requests]
    for size in chunks:
        done = [0] * len(requests)
        while any(d < r.length for d, r in zip(done, requests, strict=True)):
            some = [i for i, r in enumerate(requests) if done[i] < r.length]
            parts = [(done[i], min(done[i] + size, lengths[i])) for i in some]
            together = attend_parts(backend, [requests[i] for i in some], parts)
            for i, part, rows in zip(some, parts, together, strict=True):
                assert same_bits(rows, want[i][slice(*part)]), (size, part)
                done[i] = part[1]
            if len(some) > 1:
                alone = attend_parts(backend, [requests[some[-1]]], parts[-1:])[0]
                assert same_bits(alone, want[some[-1]][slice(*parts[-1])]), (size, parts[-1])
    ends = [(r.length - 1, r.length) for r in requests]
    for bound, padding in [(None, 0), (4 * max(lengths), 3)]:
        for i, rows in enumerate(attend_parts(backend, requests, ends, len(ends), bound, padding)):
            assert same_bits(rows, want[i][-1:]), (bound, padding)
    assert same_bits(attend_parts(backend, requests[:1], ends[:1])[0], want[0][-1:])
    # A decode token beside a whole prompt.
    mixed = attend_parts(backend, requests[:2], [ends[0], (0, requests[1].length)], 1)
    assert same_bits(mixed[0], want[0][-1:]) and same_bits(mixed[1], want[1])
    return list(zip(requests, want, strict=True))
