"""The pass over a beginning that all requests share, and what goes on from it, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo import LLM, SamplingParams
from octavo.kernels.triton import attention as kernels
from octavo.kernels.triton import attention_tiles, cascade
from octavo.kv.format import KVFormat
from octavo.layers import attention as base
from octavo.layers.attention import AttentionMetadata
from octavo.layers.attention_triton import TritonAttention, _Plan
from tests import tiny
from tests.kernels.ragged import attention_float64, ragged_batch, share_beginning

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bfloat16 product")
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that tiny batches need several of them, and splits of them; a poisoned workspace."""
    monkeypatch.setattr(kernels, "MIN_CHUNK", 16)
    monkeypatch.setattr(cascade, "MIN_CHUNK", 16)
    monkeypatch.setattr(kernels, "decode_config", lambda dim, dtype, shared: kernels.TileConfig(0, 16, 1, 4))
    monkeypatch.setattr(kernels, "prefill_config", lambda *args: kernels.TileConfig(16, 16, 1, 4))


def attend(
    backend: TritonAttention, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
) -> torch.Tensor:
    """By the cascade, with NaN in all scratch memory."""
    meta.plan = None
    backend.plan(meta)
    plan = meta.plan
    assert isinstance(plan, _Plan) and plan.shared is not None
    with torch.inference_mode():  # an engine of this process may have made the scratch memory
        plan.shared.partials.fill_(float("nan"))
        for part in plan.decodes:
            part.partials.fill_(float("nan"))
    return backend.attend(q, cache, meta)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "block", "softcap"),
    [
        ("float32", 6, 2, 80, 8, None),
        ("float32", 2, 2, 64, 32, 3.0),
        ("float16", 16, 1, 128, 16, None),
        pytest.param("bfloat16", 8, 2, 128, 16, None, marks=needs_gpu),
    ],
)
def test_layer(dtype: str, heads: int, kv_heads: int, dim: int, block: int, softcap: float | None) -> None:
    """A beginning that is not whole tiles, contexts that end right behind it and far from it, drafts."""
    fmt = KVFormat(dtype, block, kv_heads, dim)
    blocks = 72 // block
    shared = blocks * block
    bound = TOLERANCE[dtype]
    for shapes in ([(1, shared + 1), (1, shared + 60), (1, shared + 16)], [(3, shared + 3), (1, shared + 9)]):
        if (
            4 * heads // kv_heads > attention_tiles.max_decode_tile(getattr(torch, dtype))
            and shapes[0][0] > 1
        ):
            continue
        q, cache, meta = ragged_batch(shapes, heads, fmt, DEVICE, seed=len(shapes))
        share_beginning(cache, meta, blocks)
        if softcap is not None:
            q *= 8  # scores that the cap bends
            bound = max(bound, 1e-5)
        want = attention_float64(q, cache, meta, dim**-0.5, softcap=softcap)
        backend = TritonAttention(heads, fmt, dim**-0.5, softcap=softcap)
        assert relative_error(attend(backend, q, cache, meta), want) < bound


@pytest.mark.parametrize(("splits", "shared_splits"), [(1, 1), (1, 5), (3, 2)])
def test_splits(splits: int, shared_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of either; contexts that use all, some and one; twice, since the counters must be zero."""
    monkeypatch.setattr(kernels, "choose_splits", lambda *args: splits)
    monkeypatch.setattr(cascade, "shared_splits", lambda *args: shared_splits)
    heads, fmt = 6, KVFormat("float32", 8, 2, 16)
    q, cache, meta = ragged_batch([(1, 57), (1, 110), (1, 73)], heads, fmt, DEVICE)
    share_beginning(cache, meta, 7)
    want = attention_float64(q, cache, meta, 0.25)
    backend = TritonAttention(heads, fmt, 0.25)
    for _ in range(2):
        assert relative_error(attend(backend, q, cache, meta), want) < 2e-6
        assert isinstance(meta.plan, _Plan) and meta.plan.shared is not None
        assert (meta.plan.decodes[0].splits, meta.plan.shared.splits) == (splits, shared_splits)
        assert meta.plan.decodes[0].counters.count_nonzero() == 0


def test_lanes_of_many_requests_are_tiles() -> None:
    """More rows than a tile holds, a group that leaves lanes of it over."""
    heads, fmt = 3, KVFormat("float32", 8, 1, 16)
    q, cache, meta = ragged_batch([(1, 41 + i) for i in range(7)], heads, fmt, DEVICE)
    share_beginning(cache, meta, 5)
    assert cascade.shared_config(21, 3, 16, torch.float32, 1 << 20).block_m == 16
    got = attend(TritonAttention(heads, fmt, 0.25), q, cache, meta)
    assert relative_error(got, attention_float64(q, cache, meta, 0.25)) < 2e-6


def test_captured_plan_serves_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph records: one plan; requests of padding without rows, and any shared length, even none."""
    monkeypatch.setattr(kernels, "choose_splits", lambda *args: 3)
    heads, fmt = 4, KVFormat("float32", 8, 2, 16)
    q, cache, meta = ragged_batch([(1, 150)] * 4, heads, fmt, DEVICE)
    meta.shared_blocks, meta.shared_len = 5, torch.zeros(1, dtype=torch.int32, device=DEVICE)
    backend = TritonAttention(heads, fmt, 0.25)
    backend.prepare_capture(meta)
    cases = [
        ([(1, 100), (1, 73), (1, 90)], 9),
        ([(1, 20), (1, 17)], 2),
        ([(1, 9), (1, 30)], 1),
        ([(1, 3)], 0),
    ]
    for shapes, blocks in cases:
        small_q, cache, small = ragged_batch(shapes, heads, fmt, DEVICE, seed=blocks)
        share_beginning(cache, small, blocks)
        n = small.num_requests
        q.fill_(float("nan"))[:n] = small_q
        meta.query_start.fill_(n)[: n + 1] = small.query_start
        meta.seq_lens.zero_()[:n] = small.seq_lens
        meta.block_table.zero_()[:n, : small.block_table.shape[1]] = small.block_table
        meta.shared_len.copy_(small.shared_len)
        backend.prepare_replay(meta)
        assert isinstance(meta.plan, _Plan) and meta.plan.shared is not None
        meta.plan.shared.partials.fill_(float("nan"))
        got = backend.attend(q, cache, meta)
        assert relative_error(got[:n], attention_float64(small_q, cache, small, 0.25)) < 2e-6


def test_engine_reads_a_shared_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, from the scheduler's hint to the kernels: the same tokens as by the plain backend."""
    for name, value in [("BYTES", 0), ("REQUESTS", 2), ("TOKENS", 16)]:
        monkeypatch.setattr(base, f"MIN_SHARED_{name}", value)
    lengths: list[int] = []
    attend_shared = cascade.attend_shared

    def spy(*args: Any) -> None:
        lengths.append(int(args[5].length))
        attend_shared(*args)

    monkeypatch.setattr(cascade, "attend_shared", spy)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    head = [7 * i % 300 for i in range(21)]
    tokens = {}
    for name in ("triton", "torch"):
        with LLM(
            str(tiny.checkpoint("llama")), dtype="float32", device=DEVICE, max_model_len=64, max_num_seqs=4,
            block_size=8, kv_cache_memory_bytes=4 << 20, attention_backend=name, skip_tokenizer_init=True,
            check_invariants=True, enforce_eager=True,
        ) as llm:  # fmt: skip
            prompts = [{"prompt_token_ids": [*head, i]} for i in (3, 5)]
            tokens[name] = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert tokens["triton"] == tokens["torch"]
    layers = len(lengths) // 3  # of the three steps after the prompts'
    assert layers > 1 and lengths == [16] * 3 * layers


def test_who_does_not_cascade() -> None:
    """Windows, groups beyond the decode kernel's tile, steps with prompts, and whoever is not told to."""
    fmt = KVFormat("float32", 8, 1, 16)
    assert not TritonAttention(2, fmt, 1.0, 20).cascades
    assert not TritonAttention(64, fmt, 1.0).cascades
    backend = TritonAttention(2, fmt, 1.0)
    assert backend.cascades
    for shapes, blocks in [([(1, 30), (1, 40)], 0), ([(1, 30), (1, 40), (20, 50)], 3)]:
        _, cache, meta = ragged_batch(shapes, 2, fmt, DEVICE, num_decodes=2)
        share_beginning(cache, meta, blocks)
        backend.plan(meta)
        assert isinstance(meta.plan, _Plan) and meta.plan.shared is None


def test_tiles_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few lanes take half a tile; the programs fill a device once, in pieces that are worth their results."""
    monkeypatch.undo()
    bf16, memory = torch.bfloat16, 228 << 10
    for lanes, rows in [(16, 64), (64, 64), (68, 128), (4096, 128)]:
        tile = cascade.shared_config(lanes, 4, 128, bf16, memory)
        assert tile.block_m == rows and cascade.MIN_CHUNK % tile.block_n == 0
        splits = cascade.shared_splits(lanes // 4, 8, 4, 128, 12288, 132, tile)
        places = 132 * (2 if tile.warps == 4 else 1)
        assert 0.8 * places <= 8 * -(-lanes // rows) * splits <= places
        assert cascade.shared_splits(lanes // 4, 8, 4, 128, 500, 132, tile) <= 2
    for dim in (64, 112, 192, 256):
        for dtype, smem in [(torch.float32, memory), (bf16, memory), (bf16, 100 << 10)]:
            tile = cascade.shared_config(200, 20, dim, dtype, smem)
            assert 20 <= tile.block_m <= 128 and cascade.MIN_CHUNK % tile.block_n == 0
