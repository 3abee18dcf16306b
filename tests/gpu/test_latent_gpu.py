"""Latent attention on a device: real sizes, graphs, races, large caches, DeepSeek models, a report of times.

`pytest tests/gpu/test_latent_gpu.py -s` prints the report.
"""

# Without a device nothing may be imported that defines kernels (tests/kernels interprets them).
# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from octavo.kernels.triton import latent as kernels
from octavo.kv.format import KVFormat
from octavo.layers.attention import AttentionMetadata
from octavo.layers.latent_attention_triton import TritonLatentAttention
from tests.kernels.latent_cases import check_write, expected_attention, latent_batch, relative_error
from tests.models import test_deepseek_parity as parity
from tests.models.paged import PagedRun

RANK, ROPE, SCALE = 512, 64, 192**-0.5
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
MIXED = [(1, 700), (1, 1), (1, 129), (150, 150), (33, 500), (2, 260)]


def backend(
    heads: int, dtype: str, rank: int = RANK, rope: int = ROPE, block: int = 16
) -> TritonLatentAttention:
    return TritonLatentAttention(heads, KVFormat(dtype, block, 1, rank + rope, latent=True), rank, SCALE)


@pytest.mark.parametrize(
    ("dtype", "heads", "rank", "rope", "block"),
    [
        ("bfloat16", 16, RANK, ROPE, 16),
        ("bfloat16", 128, RANK, ROPE, 32),
        ("float16", 20, 96, 24, 8),
        ("float32", 16, 128, 32, 16),
    ],
)
def test_attention(dtype: str, heads: int, rank: int, rope: int, block: int) -> None:
    for shapes, decodes in [(MIXED, 3), ([(4, 300), (3, 3), (1, 40)], 0)]:
        q, cache, meta = latent_batch(shapes, heads, rank, rope, block, dtype, "cuda", num_decodes=decodes)
        got = backend(heads, dtype, rank, rope, block).attend(q, cache, meta)
        want = expected_attention(q, cache, meta, rank, SCALE)
        assert relative_error(got, want) < TOLERANCE[dtype]


def test_rotates_and_writes() -> None:
    write = kernels.rotate_and_write_latent
    check_write(write, 128, RANK, ROPE, 16, torch.bfloat16, device="cuda", rows=300)
    check_write(write, 16, RANK, ROPE, 16, torch.float32, device="cuda")
    check_write(write, 3, 20, 6, 8, torch.float16, torch.float32, "cuda")


def test_splits_give_the_same_bits_every_time() -> None:
    q, cache, meta = latent_batch(
        [(1, 5000), (1, 300), (1, 2047), (1, 128)], 16, RANK, ROPE, 16, "bfloat16", "cuda"
    )
    layer = backend(16, "bfloat16")
    layer.plan(meta)
    assert meta.plan.decodes[0].splits > 4
    first = layer.attend(q, cache, meta)
    assert relative_error(first, expected_attention(q, cache, meta, RANK, SCALE)) < TOLERANCE["bfloat16"]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        different += (layer.attend(q, cache, meta) != first).sum()
    assert int(different) == 0


def test_recorded_graph_serves_other_lengths() -> None:
    most, context, heads = 8, 2048, 16
    meta = decode_batch(most, context)
    meta.seq_lens.fill_(1)
    q = torch.zeros(most, heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(600, 1, 1, 16, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    layer = backend(heads, "bfloat16")
    layer.prepare_capture(meta)
    layer.attend(q, cache, meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.attend(q, cache, meta)
    for seed, lengths in enumerate([[2048, 1, 700, 15, 16, 17, 1024, 3], [40, 2000], [1]]):
        n = len(lengths)
        small_q, small_cache, small = latent_batch(
            [(1, x) for x in lengths], heads, RANK, ROPE, 16, "bfloat16", "cuda", seed
        )
        q[:n], cache[: len(small_cache)] = small_q, small_cache
        meta.query_start.fill_(n)[: n + 1] = small.query_start
        meta.seq_lens.zero_()[:n] = small.seq_lens
        width = min(small.block_table.shape[1], meta.block_table.shape[1])
        meta.block_table.zero_()[:n, :width] = small.block_table[:, :width]
        layer.prepare_replay(meta)
        want = expected_attention(small_q, small_cache, small, RANK, SCALE)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert relative_error(out[:n], want) < TOLERANCE["bfloat16"]


def test_cache_beyond_32_bit_offsets() -> None:
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free device memory")
    q, small, meta = latent_batch([(1, 90), (40, 77)], 16, RANK, ROPE, 16, "bfloat16", "cuda", num_decodes=1)
    shift = 240_000  # blocks of 9216 elements: past 2^31
    cache = torch.empty(shift + len(small), *small.shape[1:], dtype=torch.bfloat16, device="cuda")
    cache[shift:] = small
    rows = meta.num_rows
    kv = torch.randn(rows, RANK + ROPE, device="cuda").bfloat16()
    for to, slots in ((small, meta.slot_mapping), (cache, meta.slot_mapping + shift * 16)):
        kernels.rotate_and_write_latent(
            q[..., RANK:].clone(), q[..., RANK:].clone(), kv, kv[0, :RANK], 1e-6,
            torch.ones(100, ROPE, device="cuda"), torch.arange(rows, device="cuda"), to, slots,
        )  # fmt: skip
    assert torch.equal(torch.nan_to_num(cache[shift:]), torch.nan_to_num(small))
    want = expected_attention(q, small, meta, RANK, SCALE)
    meta.block_table += shift
    assert relative_error(backend(16, "bfloat16").attend(q, cache, meta), want) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("variant", ["v2-lite", "v3"])
def test_logits_equal_transformers(variant: str) -> None:
    model = parity.octavo_model(variant, 16, "triton", device="cuda")
    for chunk in (1, 7, 1000):
        parity.check(PagedRun(model, 3, 64).prompts(parity.prompts(), chunk), variant)


# ---- times ------------------------------------------------------------------------------------------


def decode_batch(requests: int, context: int, rows: int = 1) -> AttentionMetadata:
    """`requests` with `rows` rows each at the end of `context` tokens, on blocks in scrambled order."""
    per_request = -(-context // 16)
    order = torch.randperm(requests * per_request, device="cuda").int()
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * rows
    lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    slots = torch.full((requests * rows,), -1, device="cuda")
    table = order.view(requests, per_request)
    return AttentionMetadata(starts, lens, table, slots, requests, requests * rows, rows, context)


def microseconds(call: Callable[[], object]) -> float:
    """Of one call, as a graph of 20 replayed until the clock is good enough."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
    best = float("inf")
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1e3 / 20


def limits() -> tuple[float, float]:
    """Bytes and bfloat16 operations that the device does in a second, as PyTorch's own kernels reach them."""
    source = torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    to = torch.empty_like(source)
    copying = microseconds(lambda: to.copy_(source))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * source.nbytes / copying * 1e6, 2 * 8192**3 / microseconds(lambda: a @ a) * 1e6


def cases(
    bandwidth: float, flops: float
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor, AttentionMetadata, float]]:
    """Heads, rows of a request, query, cache, batch, and the least microseconds that it can take: to read the
    vectors once, or to do the arithmetic."""
    size = RANK + ROPE
    for heads in (16, 128):  # DeepSeek-V2-Lite's, V3's
        for requests, context, rows in [(1, 4096, 1), (32, 4096, 1), (1, 2048, 2048)]:
            cache = torch.randn(requests * context // 16, 1, 1, 16, size, device="cuda").bfloat16()
            q = torch.randn(requests * rows, heads, size, device="cuda").bfloat16()
            pairs = requests * rows * heads * (context - (rows - 1) / 2)
            reading = (cache.nbytes + q.nbytes + q.nbytes * RANK // size) / bandwidth
            least = max(reading, pairs * 2 * (size + RANK) / flops) * 1e6
            print(f"{heads} heads, {requests} x {rows} rows of {context}: at least {least:.1f} us")
            yield heads, rows, q, cache, decode_batch(requests, context, rows), least


def time_of(heads: int, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, what: object) -> float:
    layer = backend(heads, "bfloat16")
    layer.plan(meta)
    took = microseconds(lambda: layer.attend(q, cache, meta))
    print(f"    {what}: {took:.1f} us, splits {[d.splits for d in meta.plan.decodes]}")
    return took


def test_report_of_times() -> None:
    """Decoding over 4096 tokens, one request and 32, and a chunk of 2048 rows, against what they need."""
    bandwidth, flops = limits()
    print(f"\n{torch.cuda.get_device_name()}: {bandwidth / 1e12:.2f} TB/s, {flops / 1e12:.0f} TFLOP/s")
    shares = []
    for heads, _, q, cache, meta, least in cases(bandwidth, flops):
        took = time_of(heads, q, cache, meta, "default tile")
        if least > 20:  # below, launches decide
            shares.append(took / least)
    # Loose, so that a busy device passes: an order of magnitude off is a fault.
    assert shares and max(shares) < 15


@pytest.mark.slow
def test_report_of_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = [(16, 32, 3, 4), (16, 64, 2, 8), (32, 64, 2, 8), (64, 32, 2, 8), (64, 64, 2, 8)]
    compared = 0
    for heads, rows, q, cache, meta, _ in cases(*limits()):
        want = backend(heads, "bfloat16").attend(q, cache, meta)
        for tile in (kernels.LatentTile(*t) for t in tiles):
            which = "decode_tile" if rows == 1 else "prefill_tile"
            monkeypatch.setattr(kernels, which, lambda *args, tile=tile: tile)
            try:
                time_of(heads, q, cache, meta, tile)
            except OutOfResources as error:
                print(f"    {tile}: {error}")
                continue
            assert relative_error(backend(heads, "bfloat16").attend(q, cache, meta), want) < 8e-3
            compared += 1
        monkeypatch.undo()
    assert compared
