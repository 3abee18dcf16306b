"""The CPU's latent attention against its plain twin, on ragged batches over a scattered, poisoned cache."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.cpu import latent, ops
from octavo.layers.attention import AttentionMetadata
from tests.kernels.latent_cases import NAN, check_write, expected_attention, latent_batch, relative_error

pytestmark = pytest.mark.skipif(not ops.available(), reason=ops.why_not())

TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}
# Lone tokens, whole prompts, chunks, a context of several pieces, drafts over one, no rows, no context.
SHAPES = [(1, 1), (1, 130), (17, 17), (9, 40), (1, 1300), (3, 1030), (0, 12), (0, 0), (70, 99)]


def run(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, rank: int, scale: float
) -> torch.Tensor:
    out = torch.full((*q.shape[:2], rank), NAN, dtype=q.dtype)
    return latent.latent_attention(
        q, cache, meta.query_start, meta.seq_lens, meta.block_table, rank, scale, out
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "block_size"),
    [(16, 512, 64, 16), (128, 64, 16, 4), (3, 20, 6, 8), (1, 32, 8, 32), (40, 16, 2, 12)],
)
def test_ragged_batch(heads: int, rank: int, rope: int, block_size: int, dtype: str):
    shapes = SHAPES if heads * rank < 2048 else [(1, 600), (5, 70), (3, 3)]
    q, cache, meta = latent_batch(shapes, heads, rank, rope, block_size, dtype)
    want = expected_attention(q, cache, meta, rank, 0.2)
    assert relative_error(run(q, cache, meta, rank, 0.2), want) < TOLERANCE[dtype]


def test_cache_of_another_dtype():
    q, cache, meta = latent_batch([(1, 40), (5, 9)], 4, 32, 8, 8)
    cache = cache.bfloat16()
    assert relative_error(run(q, cache, meta, 32, 0.2), expected_attention(q, cache, meta, 32, 0.2)) < 2e-6


def test_result_depends_on_neither_threads_nor_neighbours():
    q, cache, meta = latent_batch(SHAPES, 16, 32, 8, 16)
    expected = run(q, cache, meta, 32, 0.2)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(run(q, cache, meta, 32, 0.2), expected)
    finally:
        torch.set_num_threads(before)
    starts = meta.query_start.tolist()
    for i, (rows, context) in enumerate(SHAPES):
        own = slice(starts[i], starts[i + 1])
        out = torch.full((rows, 16, 32), NAN)
        latent.latent_attention(
            q[own], cache, torch.tensor([0, rows], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32), meta.block_table[i : i + 1], 32, 0.2, out,
        )  # fmt: skip
        assert torch.equal(out, expected[own])


def test_padding_rows_are_left_alone():
    q, cache, meta = latent_batch([(1, 20), (4, 30)], 4, 16, 8, 8)
    padded = torch.cat([q, torch.full((5, *q.shape[1:]), NAN)])
    out = torch.full((*padded.shape[:2], 16), 3.0)
    latent.latent_attention(padded, cache, meta.query_start, meta.seq_lens, meta.block_table, 16, 0.2, out)
    assert relative_error(out[:-5], expected_attention(q, cache, meta, 16, 0.2)) < 2e-6
    assert (out[-5:] == 3.0).all()


def test_large_scores_do_not_overflow():
    q, cache, meta = latent_batch([(1, 700), (9, 30)], 4, 16, 8, 8)
    q *= 300
    # Scores of some thousands: their rounding alone moves the results.
    assert relative_error(run(q, cache, meta, 16, 1.0), expected_attention(q, cache, meta, 16, 1.0)) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "block_size"), [(16, 512, 64, 16), (3, 20, 6, 8), (1, 32, 8, 4)]
)
def test_rotates_and_writes(heads: int, rank: int, rope: int, block_size: int, dtype: torch.dtype):
    check_write(latent.rotate_and_write_latent, heads, rank, rope, block_size, dtype)


def test_writes_a_cache_of_another_dtype():
    check_write(latent.rotate_and_write_latent, 4, 32, 8, 8, torch.float32, torch.bfloat16)


def test_refuses_what_it_cannot_take():
    q, cache, meta = latent_batch([(1, 20)], 4, 18, 8, 8)
    with pytest.raises(ValueError, match="kv_rank 18"):
        run(q, cache, meta, 18, 0.2)
    q, cache, meta = latent_batch([(1, 20)], 4, 16, 8, 8)
    with pytest.raises(ValueError, match="contiguous"):
        run(q, cache[:, :, :, ::2], meta, 16, 0.2)
    with pytest.raises(TypeError, match="float16"):
        run(q.half(), cache, meta, 16, 0.2)
