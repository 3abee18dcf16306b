"""Triton's latent attention against its plain twin, in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton import latent as kernels
from octavo.kv.format import KVFormat
from octavo.layers import latent_attention_triton
from octavo.layers.latent_attention_triton import TritonLatentAttention
from tests.kernels.latent_cases import NAN, check_write, expected_attention, latent_batch, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"float32": 2e-6, "float16": 2e-3}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that tiny batches need several of them, and splits of them."""
    monkeypatch.setattr(kernels, "MIN_CHUNK", 16)
    monkeypatch.setattr(kernels, "decode_tile", lambda *args: kernels.LatentTile(16, 16, 1, 4))
    monkeypatch.setattr(kernels, "prefill_tile", lambda *args: kernels.LatentTile(16, 16, 1, 4))


def backend(heads: int, rank: int, rope: int, block: int, dtype: str = "float32") -> TritonLatentAttention:
    return TritonLatentAttention(heads, KVFormat(dtype, block, 1, rank + rope, latent=True), rank, 0.2)


@pytest.mark.parametrize(
    ("dtype", "heads", "rank", "rope", "block"),
    [
        ("float32", 16, 64, 16, 16),
        ("float32", 20, 32, 8, 8),
        ("float32", 3, 20, 6, 32),
        ("float32", 1, 16, 2, 4),
        ("float16", 5, 32, 8, 8),
    ],
)
def test_mixed_batch(dtype: str, heads: int, rank: int, rope: int, block: int) -> None:
    # Decodes first (one at a block's start, one with a context of 1), then chunks with and without context.
    shapes = [(1, 33), (1, 1), (5, 5), (9, 40)]
    q, cache, meta = latent_batch(shapes, heads, rank, rope, block, dtype, DEVICE, num_decodes=2)
    layer = backend(heads, rank, rope, block, dtype)
    layer.plan(meta)
    got = layer.attend(q, cache, meta)
    assert relative_error(got, expected_attention(q, cache, meta, rank, 0.2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_splits(splits: int) -> None:
    """Any number of splits, with contexts that fill all, some and one of them, and with several rows, the
    first of which the last split is hidden from; the same bits every time."""
    heads, rank = 3, 16
    shapes = [(1, 65), (0, 0), (1, 17), (2, 33)]
    q, cache, meta = latent_batch(shapes, heads, rank, 8, 8, device=DEVICE)
    size = kernels.latent_workspace_size(len(shapes), heads, 2, rank, splits)
    want = expected_attention(q, cache, meta, rank, 0.2)
    outs = []
    for _ in range(2):
        partials = torch.full((size,), NAN, device=DEVICE)
        out = torch.full((*q.shape[:2], rank), NAN, device=DEVICE)
        kernels.latent_decode(
            q, cache, out, meta.query_start, meta.seq_lens, meta.block_table, 0, len(shapes), 2, splits,
            partials, rank, 0.2,
        )  # fmt: skip
        assert relative_error(out, want) < 2e-6
        outs.append(out)
    assert torch.equal(*outs)


def test_several_rows_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification of drafts: few rows a request, each with its own causal limit, over split contexts."""
    monkeypatch.setattr(latent_attention_triton, "choose_splits", lambda *args: 3)
    q, cache, meta = latent_batch([(4, 50), (3, 3), (1, 17)], 6, 16, 8, 8, device=DEVICE)
    layer = backend(6, 16, 8, 8)
    layer.plan(meta)
    assert [d.max_rows for d in meta.plan.decodes] == [4]
    assert relative_error(layer.attend(q, cache, meta), expected_attention(q, cache, meta, 16, 0.2)) < 2e-6


def test_many_rows_are_tiled() -> None:
    """The prefill kernel finds the request of each tile, empty requests and a loose bound included."""
    heads, rank = 3, 16
    shapes = [(1, 9), (0, 0), (5, 5), (0, 12), (11, 19), (1, 1), (6, 24)]
    q, cache, meta = latent_batch(shapes, heads, rank, 8, 8, device=DEVICE)
    want = expected_attention(q, cache, meta, rank, 0.2)
    for first, extra in [(0, 0), (3, 7)]:
        out = torch.zeros(*q.shape[:2], rank, device=DEVICE)
        start = int(meta.query_start[first])
        kernels.latent_prefill(
            q, cache, out, meta.query_start, meta.seq_lens, meta.block_table, first, len(shapes),
            meta.num_rows - start + extra, rank, 0.2,
        )  # fmt: skip
        assert relative_error(out[start:], want[start:]) < 2e-6
        assert out[:start].count_nonzero() == 0


def test_cache_may_be_a_slice_of_a_pool() -> None:
    q, cache, meta = latent_batch([(1, 20), (9, 21)], 4, 16, 8, 8, device=DEVICE, num_decodes=1)
    pool = torch.full((len(cache), 3, *cache.shape[1:]), NAN, device=DEVICE)
    pool[:, 1] = cache
    got = backend(4, 16, 8, 8).attend(q, pool[:, 1], meta)
    assert relative_error(got, expected_attention(q, cache, meta, 16, 0.2)) < 2e-6


def test_captured_plan_serves_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph records: one plan, tensors rewritten in place, requests of padding without rows."""
    monkeypatch.setattr(latent_attention_triton, "choose_splits", lambda *args: 3)
    q, _, meta = latent_batch([(1, 60)] * 4, 5, 16, 8, 8, device=DEVICE)
    layer = backend(5, 16, 8, 8)
    layer.prepare_capture(meta)
    for shapes in ([(1, 60), (1, 3), (1, 33)], [(1, 1)]):
        small_q, cache, small = latent_batch(shapes, 5, 16, 8, 8, device=DEVICE, seed=len(shapes))
        n = small.num_requests
        q[:n] = small_q
        meta.query_start.fill_(n)[: n + 1] = small.query_start
        meta.seq_lens.zero_()[:n] = small.seq_lens
        meta.block_table.zero_()[:n, : small.block_table.shape[1]] = small.block_table
        layer.prepare_replay(meta)
        got = layer.attend(q, cache, meta)
        assert relative_error(got[:n], expected_attention(small_q, cache, small, 16, 0.2)) < 2e-6


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "block"), [(16, 64, 16, 16), (3, 20, 6, 8), (40, 16, 32, 4)]
)
def test_rotates_and_writes(heads: int, rank: int, rope: int, block: int) -> None:
    check_write(kernels.rotate_and_write_latent, heads, rank, rope, block, device=DEVICE)
    check_write(
        kernels.rotate_and_write_latent,
        heads,
        rank,
        rope,
        block,
        torch.float16,
        torch.float32,
        DEVICE,
        rows=5,
    )
