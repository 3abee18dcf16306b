"""Random rows and caches of latent attention, and its plain twins on them, for the tests of its kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.kernels import reference_latent
from octavo.kv.format import KVFormat
from octavo.layers.attention import AttentionMetadata
from tests.kernels.ragged import ragged_batch

NAN = float("nan")


def latent_batch(
    shapes: list[tuple[int, int]],
    heads: int,
    rank: int,
    rope: int,
    block_size: int,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    num_decodes: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Queries, a cache that holds NaN wherever no vector lies, and metadata of (rows, context length)."""
    fmt = KVFormat(dtype, block_size, 1, rank + rope, latent=True)
    return ragged_batch(shapes, heads, fmt, device, seed, num_decodes)


def expected_attention(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, rank: int, scale: float
) -> torch.Tensor:
    """The plain twin in float32; positions that nobody may read count as 0 there."""
    return reference_latent.latent_attention(
        q.float(), cache.float().nan_to_num(0.0), meta.query_start, meta.seq_lens, meta.block_table, rank,
        scale, q.new_zeros(*q.shape[:2], rank, dtype=torch.float32),
    )  # fmt: skip


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.double().norm())


def check_write(
    write: Callable[..., None],
    heads: int,
    rank: int,
    rope: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    rows: int = 21,
) -> None:
    """A `rotate_and_write_latent` against its twin: strided rows, one of them not stored."""
    g = torch.Generator().manual_seed(heads)
    nope = 5
    down = torch.randn(rows, 7 + rank + rope, generator=g).to(device, dtype)  # compressed queries before it
    q = torch.randn(rows, heads, nope + rope, generator=g).to(device, dtype)
    weight = torch.randn(rank, generator=g).to(device, dtype)
    cos_sin = torch.randn(64, rope, generator=g).to(device)
    positions = torch.randint(0, 64, (rows,), generator=g).to(device)
    blocks = rows // block_size + 3
    slots = torch.randperm(blocks * block_size, generator=g)[:rows]
    slots[3] = -1
    slots = slots.to(device)
    results = []
    for function in (write, reference_latent.rotate_and_write_latent):
        cache = torch.full((blocks, 1, 1, block_size, rank + rope), 7.0, device=device)
        cache = cache.to(cache_dtype or dtype)
        query = torch.full((rows, heads, rank + rope), NAN, device=device, dtype=dtype)
        function(
            q[..., nope:], query[..., rank:], down[:, 7:], weight, 1e-6, cos_sin, positions, cache, slots
        )
        assert query[..., :rank].isnan().all()
        results.append((query[..., rank:].float(), cache.float()))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert int((results[0][1] == 7.0).all(-1).sum()) == blocks * block_size - (rows - 1)
