"""Triton's attention kernels against float64 and against the plain backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton import attention as kernels
from octavo.kernels.triton import attention_tiles, rotary_kv
from octavo.kv.format import KVFormat
from octavo.layers.attention import QKV, AttentionBackend, AttentionMetadata, TorchAttention
from octavo.layers.attention_triton import TritonAttention
from tests.kernels.ragged import attention_float64, forget_before_window, ragged_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bfloat16 product")
PREFILL_CONFIG = kernels.prefill_config
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that tiny batches need several of them, and splits of them."""
    monkeypatch.setattr(kernels, "MIN_CHUNK", 16)
    monkeypatch.setattr(kernels, "decode_config", lambda dim, dtype, shared: kernels.TileConfig(0, 16, 1, 4))
    monkeypatch.setattr(kernels, "prefill_config", lambda *args: kernels.TileConfig(16, 16, 1, 4))


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "block", "window"),
    [
        ("float32", 4, 2, 64, 16, None),
        ("float32", 3, 1, 80, 8, None),
        ("float32", 6, 2, 16, 16, 7),
        ("float32", 2, 1, 256, 32, 20),
        ("float16", 2, 2, 96, 8, None),
        pytest.param("bfloat16", 4, 2, 128, 16, None, marks=needs_gpu),
    ],
)
def test_mixed_batch(dtype: str, heads: int, kv_heads: int, dim: int, block: int, window: int | None) -> None:
    fmt = KVFormat(dtype, block, kv_heads, dim)
    # Decodes first (one at a block's start, one with a context of 1), then chunks with and without context.
    shapes = [(1, 33), (1, 1), (17, 17), (9, 40)]
    q, cache, meta = ragged_batch(shapes, heads, fmt, DEVICE, num_decodes=2)
    scale = dim**-0.5
    backend = TritonAttention(heads, fmt, scale, window)
    backend.plan(meta)
    got = backend.attend(q, cache, meta)
    want = attention_float64(q, cache, meta, scale, window)
    assert relative_error(got, want) < TOLERANCE[dtype]
    plain = TorchAttention(heads, fmt, scale, window)
    meta.plan = None
    assert relative_error(plain.attend(q, cache, meta), want) < TOLERANCE[dtype]


@pytest.mark.parametrize(("cap", "window"), [(2.0, None), (50.0, 9)])
def test_softcap(cap: float, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores far below and far above the cap, by both kernels, split and whole."""
    monkeypatch.setattr(kernels, "choose_splits", lambda *args: 2)
    heads, fmt = 4, KVFormat("float32", 8, 2, 16)
    q, cache, meta = ragged_batch([(1, 33), (1, 1), (9, 20)], heads, fmt, DEVICE, num_decodes=2)
    q *= torch.logspace(-2, 2, meta.num_rows, device=DEVICE)[:, None, None]
    want = attention_float64(q, cache, meta, 0.25, window, cap)
    assert relative_error(want, attention_float64(q, cache, meta, 0.25, window)) > 0.01
    for backend in (TritonAttention, TorchAttention):
        meta.plan = None
        got = backend(heads, fmt, 0.25, window, cap).attend(q, cache, meta)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 5, 8, 11, 1000])
def test_window_never_reads_blocks_it_left_behind(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, drafts and chunks (longer than some windows), split; smaller, as large as and larger than a
    block of 8 and than the context."""
    monkeypatch.setattr(kernels, "choose_splits", lambda *args: 2)
    heads, fmt = 2, KVFormat("float32", 8, 1, 16)
    for shapes, decodes in [([(1, 50), (1, 8), (17, 60)], 2), ([(3, 40), (2, 17)], 0)]:
        q, cache, meta = ragged_batch(shapes, heads, fmt, DEVICE, num_decodes=decodes)
        want = attention_float64(q, cache, meta, 0.25, window)
        assert bool(forget_before_window(cache, meta, window)) == (window < 1000)
        for backend in (TritonAttention, TorchAttention):
            meta.plan = None
            got = backend(heads, fmt, 0.25, window).attend(q, cache, meta)
            assert relative_error(got, want) < TOLERANCE["float32"]


@pytest.mark.parametrize("context", [1, 63, 64, 65, 130, 400])
def test_a_single_row_is_split_from_its_tile_on(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut that one row gets on a device, unlike those above, which make splits of few positions."""
    monkeypatch.undo()
    fmt = KVFormat("float16", 16, 2, 64)
    q, cache, meta = ragged_batch([(1, context)], 8, fmt, DEVICE)
    want = attention_float64(q, cache, meta, 0.125)
    meta.max_seq_len = 1000
    got = TritonAttention(8, fmt, 0.125).attend(q, cache, meta)
    assert meta.plan.decodes[0].splits > 3 and kernels.SINGLE.block_n == 64
    assert relative_error(got, want) < TOLERANCE["float16"]


@pytest.mark.parametrize(
    ("shapes", "apart"), [([(1, 400)], True), ([(4, 400)], True), (40 * [(1, 20)], False)]
)
def test_splits_of_few_requests_are_added_up_apart(
    shapes: list[tuple[int, int]], apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not those of a single row over a quantized cache, which is split late."""
    monkeypatch.undo()
    fmt = KVFormat("float16", 16, 2, 64)
    _, _, meta = ragged_batch(shapes, 8, fmt, DEVICE)
    meta.max_seq_len = 1000
    for kind, want in ((fmt, apart), (KVFormat("fp8", 16, 2, 64), apart and shapes[0][0] > 1)):
        meta.plan = None
        TritonAttention(8, kind, 0.125).plan(meta)
        assert [part.apart for part in meta.plan.decodes] == [want]


def test_splits_follow_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is planned for the engine's longest context; a windowed layer splits its window alone."""
    monkeypatch.setattr(kernels, "MIN_CHUNK", 128)
    fmt = KVFormat("bfloat16", 16, 1, 64)
    _, _, meta = ragged_batch([(1, 8)], 4, fmt, DEVICE)
    meta.max_seq_len = 100_000
    splits = {}
    for window in (None, 100, 512, 200_000):
        TritonAttention(4, fmt, 1.0, window).prepare_capture(meta)
        splits[window] = meta.plan.decodes[0].splits
    assert splits[100] == 1 and 3 <= splits[512] <= 5
    assert splits[None] == splits[200_000] > splits[512]


def test_large_groups_in_float32_are_tiled() -> None:
    """Rows times group beyond the decode kernel's largest tile go to the prefill kernel."""
    fmt = KVFormat("float32", 8, 1, 16)
    q, cache, meta = ragged_batch([(3, 20), (2, 9)], 16, fmt, DEVICE)
    backend = TritonAttention(16, fmt, 0.25)
    backend.plan(meta)
    assert attention_tiles.max_decode_tile(torch.float32) == 32 and meta.plan.decodes == ()
    assert relative_error(backend.attend(q, cache, meta), attention_float64(q, cache, meta, 0.25)) < 2e-6


def test_tiles_fit_their_device() -> None:
    """Of head size 256 the prefill tile follows the device's shared memory (bytes: see the table there)."""
    for kib, rows in [(228, 128), (164, 64), (100, 64)]:
        assert PREFILL_CONFIG(256, torch.bfloat16, kib << 10).block_m == rows
        assert PREFILL_CONFIG(128, torch.bfloat16, kib << 10).block_m == 128


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_splits(splits: int, window: int | None) -> None:
    """Any number of splits, with contexts that fill all, some and one of them; twice, for the counters."""
    heads, fmt = 4, KVFormat("float32", 8, 2, 16)
    shapes = [(1, 65), (0, 0), (1, 17), (1, 16)]
    q, cache, meta = ragged_batch(shapes, heads, fmt, DEVICE)
    sizes = kernels.decode_workspace_sizes(len(shapes), 2, 2, 16, 1, splits)
    partials = torch.full((sizes[0],), float("nan"), device=DEVICE)
    counters = torch.zeros(sizes[1], dtype=torch.int32, device=DEVICE)
    want = attention_float64(q, cache, meta, 0.25, window)
    for _ in range(2):
        out = torch.full_like(q, float("nan"))
        kernels.paged_decode(
            q, cache, out, meta.query_start, meta.seq_lens, meta.block_table, 0, len(shapes), 1, splits,
            partials, counters, 0.25, window,
        )  # fmt: skip
        assert relative_error(out, want) < 2e-6
        assert counters.count_nonzero() == 0


def test_several_rows_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification of drafts: few rows a request, each with its own causal limit, over split contexts."""
    heads, fmt = 6, KVFormat("float32", 8, 2, 16)
    monkeypatch.setattr(kernels, "choose_splits", lambda *args: 3)
    q, cache, meta = ragged_batch([(4, 50), (3, 3), (1, 17)], heads, fmt, DEVICE)
    backend = TritonAttention(heads, fmt, 0.3)
    backend.plan(meta)
    assert [d.max_rows for d in meta.plan.decodes] == [4]
    assert relative_error(backend.attend(q, cache, meta), attention_float64(q, cache, meta, 0.3)) < 2e-6


def test_many_rows_are_tiled() -> None:
    """The prefill kernel finds the request of each tile, empty requests and a loose bound included.

    It also serves requests of one row, so that the hint `num_decodes` is no more than that.
    """
    heads, fmt = 3, KVFormat("float32", 8, 1, 16)
    shapes = [(1, 9), (0, 0), (5, 5), (0, 12), (11, 19), (1, 1), (6, 24)]
    q, cache, meta = ragged_batch(shapes, heads, fmt, DEVICE)
    want = attention_float64(q, cache, meta, 0.25)
    for first, extra in [(0, 0), (3, 7)]:
        out = torch.zeros_like(q)
        kernels.paged_prefill(
            q, cache, out, meta.query_start, meta.seq_lens, meta.block_table, first, len(shapes),
            meta.num_rows - int(meta.query_start[first]) + extra, 0.25,
        )  # fmt: skip
        start = int(meta.query_start[first])
        assert relative_error(out[start:], want[start:]) < 2e-6
        assert out[:start].count_nonzero() == 0


def test_strided_rows_and_cache() -> None:
    """Queries may be a view of the QKV rows, and a layer's cache a slice of a larger pool."""
    heads, fmt = 4, KVFormat("float32", 8, 2, 16)
    q, cache, meta = ragged_batch([(1, 20), (9, 21)], heads, fmt, DEVICE, num_decodes=1)
    want = attention_float64(q, cache, meta, 0.25)
    wide = torch.full((meta.num_rows, heads + 4, 16), float("nan"), device=DEVICE)
    wide[:, :heads] = q
    pool = torch.full((len(cache), 3, *cache.shape[1:]), float("nan"), device=DEVICE)
    pool[:, 1] = cache
    got = TritonAttention(heads, fmt, 0.25).attend(wide[:, :heads], pool[:, 1], meta)
    assert relative_error(got, want) < 2e-6


def test_captured_plan_serves_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph records: one plan, tensors rewritten in place, requests of padding without rows."""
    heads, fmt = 4, KVFormat("float32", 8, 2, 16)
    monkeypatch.setattr(kernels, "choose_splits", lambda *args: 3)
    q, cache, meta = ragged_batch([(1, 60)] * 4, heads, fmt, DEVICE)
    backend = TritonAttention(heads, fmt, 0.25)
    backend.prepare_capture(meta)
    for shapes in ([(1, 60), (1, 3), (1, 33)], [(1, 1)]):
        small_q, cache, small = ragged_batch(shapes, heads, fmt, DEVICE, seed=len(shapes))
        n = small.num_requests
        q[:n] = small_q
        meta.query_start.fill_(n)[: n + 1] = small.query_start
        meta.seq_lens.zero_()[:n] = small.seq_lens
        meta.block_table.zero_()[:n, : small.block_table.shape[1]] = small.block_table
        backend.prepare_replay(meta)
        got = backend.attend(q, cache, meta)
        assert relative_error(got[:n], attention_float64(small_q, cache, small, 0.25)) < 2e-6


def test_metadata_is_read_early_only_behind_a_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is PyTorch's, and begins when what was written before it is complete."""
    early: list[bool] = []
    decode = kernels.paged_decode

    def listen(*args: Any, **options: Any) -> None:
        early.append(options["early"])
        decode(*args, **options)

    monkeypatch.setattr(kernels, "paged_decode", listen)
    fmt = KVFormat("float32", 8, 2, 16)
    q, cache, meta = ragged_batch([(1, 20), (1, 9)], 4, fmt, DEVICE, num_decodes=2)
    k, v = torch.randn(2, 2, 2, 16, device=DEVICE)
    backend, positions = TritonAttention(4, fmt, 0.25), meta.seq_lens.long() - 1
    for rotates in (False, True, False):
        if rotates:
            rows = QKV(q, k, v, torch.randn(32, 16, device=DEVICE), positions)
            q = backend.rotary_and_write_kv(rows, cache, meta)
        else:
            meta.plan = None
            backend.write_kv(k, v, cache, meta)
        want = attention_float64(q, cache, meta, 0.25)
        assert relative_error(backend.attend(q, cache, meta), want) < TOLERANCE["float32"]
    assert early == [False, True, False]


@pytest.mark.parametrize(
    ("kind", "dim", "rot", "norm", "window", "context"),
    [
        ("float32", 64, 64, None, None, 70),
        ("float32", 80, 32, "float32", None, 1),
        ("float16", 64, 48, "float16", 9, 41),
        ("fp8", 64, 64, "float32", None, 49),
        ("fp8_e5m2", 80, 16, None, 20, 33),
        ("int8", 64, 64, None, None, 16),
        ("int8+offset", 32, 32, "float32", None, 65),
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_one_row_rotates_itself(
    kind: str,
    dim: int,
    rot: int,
    norm: str | None,
    window: int | None,
    context: int,
    splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request of one row by itself: what it leaves in the cache, and attention, as by the plain backend,
    which does one after the other."""
    monkeypatch.setattr(kernels, "choose_splits", lambda *args: splits)
    heads, kv_heads, block, scale = 6, 2, 8, dim**-0.5
    fmt = KVFormat(kind.removesuffix("+offset"), block, kv_heads, dim, offset=kind.endswith("+offset"))
    dtype = torch.float32 if fmt.quantized else getattr(torch, fmt.dtype)
    order, last = torch.randperm(20), context - 1
    table = order[: last // block + 2][None].int()
    slots = (table[0, torch.arange(context) // block] * block + torch.arange(context) % block).long()
    cache = torch.zeros(20, *fmt.layer_block_shape(), dtype=torch.uint8 if fmt.quantized else dtype)
    centre = torch.randn(kv_heads, dim) if fmt.quantized else None

    def backend(of: type[AttentionBackend]) -> AttentionBackend:
        made = of(heads, fmt, scale, window)
        if fmt.dtype.startswith("fp8"):
            made.kv_scale = torch.tensor([[0.01, 0.02], [0.03, 0.015]], device=DEVICE)
        made.kv_centre = None if centre is None else centre.to(DEVICE)
        return made

    def meta(begin: int, end: int) -> AttentionMetadata:
        rows = end - begin
        starts, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, rows], [end]))
        return AttentionMetadata(
            starts, lens, table.to(DEVICE), slots[begin:end].to(DEVICE), 1, rows, rows, 20 * block
        )

    plain, cache = backend(TorchAttention), cache.to(DEVICE)
    plain.write_kv(*torch.randn(2, last, kv_heads, dim, device=DEVICE).to(dtype), cache, meta(0, last))
    row = torch.randn(1, heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    cos_sin, positions = torch.randn(200, rot, device=DEVICE), torch.tensor([last], device=DEVICE)
    weights: tuple[torch.Tensor, ...] = ()
    if norm is not None:
        weights = torch.randn(2, dim, device=DEVICE).to(getattr(torch, norm)).unbind()
    found = []
    for way in (plain, backend(TritonAttention)):
        kept, (q, k, v) = cache.clone(), row.clone().split([heads, kv_heads, kv_heads], dim=1)
        out = way.rotate_and_attend(QKV(q, k, v, cos_sin, positions, *weights), kept, meta(last, context))
        found.append((out, kept))
        monkeypatch.setattr(rotary_kv, "_rotary_write", None)  # which the last one does without
    (want, plain_cache), (got, own_cache) = found
    bound = 1e-3 if fmt.quantized else TOLERANCE[kind]
    assert relative_error(got, want.double()) < bound
    if fmt.quantized:  # codes whose keys are within rounding of halfway may be their neighbours
        assert int((own_cache != plain_cache).sum()) <= 2
        assert int((own_cache != cache).sum()) > dim // 2
    else:
        torch.testing.assert_close(own_cache, plain_cache, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("programs", "context", "want"),
    [(8, 100_000, range(29, 34)), (8, 128, range(1, 2)), (8, 384, range(3, 4)), (2048, 8192, range(1, 3))],
)
def test_choose_splits(programs: int, context: int, want: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MIN_CHUNK", 128)
    assert kernels.choose_splits(programs, context, 132) in want
