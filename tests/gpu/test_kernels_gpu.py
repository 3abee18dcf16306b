"""Triton's kernels on a device: real tile shapes, graphs, races, caches beyond 32-bit offsets.

Compiling takes most of the time: each attention case compiles two or three kernels, so the cases are few and
each differs from the others in several respects.
"""

# Without a device nothing may be imported that defines kernels (tests/kernels interprets them).
# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo.kernels import reference, reference_sampling
from octavo.kernels.triton import activation, attention, batch, norm, rotary_kv, sampling
from octavo.kv.format import KVFormat
from octavo.layers.attention import QKV, AttentionMetadata
from octavo.layers.attention_triton import TritonAttention
from tests.kernels.attention_cases import CASES, Case, check_decode, check_prefill
from tests.kernels.ragged import attention_float64, forget_before_window, ragged_batch, share_beginning

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "block", "window", "softcap", "drafts"),
    [
        ("bfloat16", 32, 8, 128, 16, None, None, True),
        ("bfloat16", 14, 2, 64, 8, 100, None, False),
        ("bfloat16", 16, 1, 256, 16, 64, 50.0, True),  # with drafts: the largest tile
        ("float32", 8, 1, 256, 16, 20, 30.0, True),  # likewise
    ],
)
def test_attention(
    dtype: str,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int | None,
    softcap: float | None,
    drafts: bool,
) -> None:
    """Who computes what of a mixed batch, against float64; NaN in all blocks that no row's window reaches."""
    fmt = KVFormat(dtype, block, kv_heads, dim)
    mixed = [(1, 700), (1, 1), (1, 129), (150, 150), (33, 500), (2, 260)]
    bound = TOLERANCE[dtype]
    for shapes, decodes in [(mixed, 3), ([(4, 300), (3, 3), (1, 40)], 0)][: 1 + drafts]:
        q, cache, meta = ragged_batch(shapes, heads, fmt, "cuda", num_decodes=decodes)
        if softcap is not None:
            q *= 8  # scores that the cap bends
            bound = max(bound, 1e-5)
        want = attention_float64(q, cache, meta, dim**-0.5, window, softcap)
        if window is not None:
            assert forget_before_window(cache, meta, window)
        got = TritonAttention(heads, fmt, dim**-0.5, window, softcap).attend(q, cache, meta)
        assert relative_error(got, want) < bound


@pytest.mark.parametrize(("number", "case"), enumerate(CASES), ids=str)
def test_attention_kernels(number: int, case: Case) -> None:
    """Each kernel by itself over head sizes, groups, block sizes, windows and caps; the types take turns."""
    dtype = ("bfloat16", "float16", "bfloat16", "float32")[number % 4]
    check_decode(case, dtype, [(1, 1500), (0, 0), (1, 1), (1, 700)], 3, "cuda")
    check_decode(case, dtype, [(1, 300), (1, 33)], 1, "cuda")
    check_prefill(case, dtype, [(150, 150), (0, 12), (33, 500), (1, 129), (2, 260)], "cuda")
    if case.window is None:
        shapes = [(1, 1025), (1, 2600), (1, 1088), *[(1, 1030 + i) for i in range(40)]]
        check_decode(case, dtype, shapes, 2, "cuda", 1024 // case.block)
        check_decode(case, dtype, [(1, 300), (1, 345)], 1, "cuda", 288 // case.block)


def test_whole_prompts_by_cudnn() -> None:
    """The hint changes who computes, and no more than rounding of what."""
    fmt = KVFormat("bfloat16", 16, 8, 128)
    shapes = [(1, 700), (1, 33), (1500, 1500), (1024, 1024)]
    q, cache, meta = ragged_batch(shapes, 32, fmt, "cuda", num_decodes=2)
    backend = TritonAttention(32, fmt, 128**-0.5)
    want = attention_float64(q, cache, meta, 128**-0.5)
    assert relative_error(backend.attend(q, cache, meta), want) < TOLERANCE["bfloat16"]
    meta.plan, meta.prompts = None, ((2, 2, 1500), (3, 1502, 1024))
    backend.plan(meta)
    assert meta.plan.prompts and meta.plan.prefill_from == 4
    assert relative_error(backend.attend(q, cache, meta), want) < TOLERANCE["bfloat16"]


def test_splits_never_race() -> None:
    """The last program of a head combines what the others wrote: the same bits a thousand times."""
    fmt = KVFormat("bfloat16", 16, 8, 128)
    q, cache, meta = ragged_batch([(1, 5000), (1, 300), (1, 2047), (1, 128)], 32, fmt, "cuda")
    backend = TritonAttention(32, fmt, 128**-0.5)
    backend.plan(meta)
    assert meta.plan.decodes[0].splits > 4
    first = backend.attend(q, cache, meta)
    assert relative_error(first, attention_float64(q, cache, meta, 128**-0.5)) < TOLERANCE["bfloat16"]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (backend.attend(q, cache, meta) != first).sum()
    assert int(different) == 0


def test_what_is_shared_never_races() -> None:
    """Each launch reads what the one before wrote, and overwrites what the one before that read."""
    fmt = KVFormat("bfloat16", 16, 8, 128)
    shapes = [(1, 2050), (1, 2100), (1, 5000), *[(1, 2060 + i) for i in range(13)]]
    batches = []
    for seed in range(3):
        q, cache, meta = ragged_batch(shapes, 32, fmt, "cuda", seed)
        share_beginning(cache, meta, 128)
        backend = TritonAttention(32, fmt, 128**-0.5)
        backend.plan(meta)
        assert (
            meta.plan.shared is not None and meta.plan.shared.splits > 1 and meta.plan.decodes[0].splits > 1
        )
        first = backend.attend(q, cache, meta)
        assert relative_error(first, attention_float64(q, cache, meta, 128**-0.5)) < TOLERANCE["bfloat16"]
        batches.append((backend, q, cache, meta, first))
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        found = [backend.attend(q, cache, meta) for backend, q, cache, meta, _ in batches]
        for got, (*_, first) in zip(found, batches, strict=True):
            different += (got != first).sum()
    assert int(different) == 0


@pytest.mark.parametrize("cascade", [False, True])
def test_recorded_graph_serves_other_lengths(cascade: bool) -> None:
    fmt, heads, most, context = KVFormat("bfloat16", 16, 8, 128), 32, 8, 2048
    meta = AttentionMetadata(
        query_start=torch.arange(most + 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.ones(most, dtype=torch.int32, device="cuda"),
        block_table=torch.zeros(most, context // 16, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.full((most,), -1, device="cuda"),
        num_requests=most,
        num_rows=most,
        max_query_len=1,
        max_seq_len=context,
        shared_blocks=int(cascade),
        shared_len=torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    q = torch.zeros(most, heads, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(600, *fmt.layer_block_shape(), dtype=torch.bfloat16, device="cuda")
    backend = TritonAttention(heads, fmt, 128**-0.5)
    backend.prepare_capture(meta)
    backend.attend(q, cache, meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(q, cache, meta)
    assert (meta.plan.shared is not None) == cascade
    cases = [(0, [2048, 1, 700, 15, 16, 17, 1024, 3]), (0, [40, 2000]), (0, [1])]
    if cascade:
        cases += [(124, [2048, 1990, 1985]), (5, [81, 700, 90, 2000]), (1, [17, 18, 19, 20, 21, 500, 22, 23])]
    for seed, (blocks, lengths) in enumerate(cases):
        n = len(lengths)
        small_q, small_cache, small = ragged_batch([(1, x) for x in lengths], heads, fmt, "cuda", seed)
        share_beginning(small_cache, small, blocks)
        meta.shared_len.copy_(small.shared_len)
        q[:n], cache[: len(small_cache)] = small_q, small_cache
        meta.query_start.fill_(n)[: n + 1] = small.query_start
        meta.seq_lens.zero_()[:n] = small.seq_lens
        width = min(small.block_table.shape[1], meta.block_table.shape[1])
        meta.block_table.zero_()[:n, :width] = small.block_table[:, :width]
        backend.prepare_replay(meta)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            want = attention_float64(small_q, small_cache, small, 128**-0.5)
            assert relative_error(out[:n], want) < TOLERANCE["bfloat16"]


def test_metadata_that_is_read_early_is_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are started early write lengths and block tables a few launches before attention reads
    them ahead of its wait: the same bits, step after step, as with a wait and the host's between."""
    fmt, heads, n, width, steps = KVFormat("bfloat16", 16, 8, 128), 32, 4, 8, 60
    slots = torch.arange(n, device="cuda")
    starts = torch.arange(n + 1, dtype=torch.int32, device="cuda")
    begin = torch.tensor([0, 15, 40, 63], device="cuda")
    computed, tokens = begin.clone(), torch.zeros(n, 16 * width, dtype=torch.int32, device="cuda")
    ids, positions, ends = tokens[:, 0].clone(), begin.clone(), begin.clone()
    order = torch.randperm(n * width, device="cuda").int().view(n, width)
    slot_mapping, lens, table, blocks = begin.clone(), ids.clone(), torch.zeros_like(order), order.clone()
    meta = AttentionMetadata(starts, lens, table, slot_mapping, n, n, 1, 16 * width)
    kv = randn(n * width, *fmt.layer_block_shape())
    cache, qkv, cos_sin = kv.clone(), randn(n, heads + 16, 128), randn(16 * width, 128, dtype=torch.float32)
    backend = TritonAttention(heads, fmt, 128**-0.5)

    def step() -> torch.Tensor:
        q, k, v = qkv.clone().split([heads, 8, 8], dim=1)
        batch.gather_rows(slots, starts, computed, tokens, ids, positions, ends, lens)
        batch.map_blocks(slots, starts, ends, blocks, 16, width, table, slot_mapping)
        backend.plan(meta)
        for _ in range(3):
            q = backend.rotary_and_write_kv(QKV(q, k, v, cos_sin, positions), cache, meta)
            out = backend.attend(q, cache, meta)
        blocks.copy_(blocks.roll(1, 0))  # the next step's
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    decode = attention.paged_decode

    def run(launch: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        computed.copy_(begin)
        cache.copy_(kv)
        blocks.copy_(order)
        return [launch().clone() for _ in range(steps)]

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    def step_by_step() -> torch.Tensor:
        found = step()
        torch.cuda.synchronize()
        return found

    found = run(replay)
    monkeypatch.setattr(attention, "paged_decode", lambda *args, early, **rest: decode(*args, **rest))
    for i, (got, want) in enumerate(zip(found, run(step_by_step), strict=True)):
        assert torch.equal(got, want), f"step {i}"


def test_cache_beyond_32_bit_offsets() -> None:
    fmt, heads = KVFormat("bfloat16", 16, 8, 128), 32
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free device memory")
    q, small, meta = ragged_batch([(1, 90), (40, 77)], heads, fmt, "cuda", num_decodes=1)
    shift = 70_000  # blocks of 2^15 elements: past 2^31
    cache = torch.empty(shift + len(small), *fmt.layer_block_shape(), dtype=torch.bfloat16, device="cuda")
    cache[shift:] = small
    k, v = (torch.randn(meta.num_rows, 8, 128, device="cuda").bfloat16() for _ in range(2))
    rotary_kv.write_kv(k, v, small, meta.slot_mapping)
    rotary_kv.write_kv(k, v, cache, meta.slot_mapping + shift * 16)
    assert torch.equal(torch.nan_to_num(cache[shift:]), torch.nan_to_num(small))
    want = attention_float64(q, small, meta, 0.1)
    meta.block_table += shift
    assert (
        relative_error(TritonAttention(heads, fmt, 0.1).attend(q, cache, meta), want) < TOLERANCE["bfloat16"]
    )


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=g, device="cuda").to(dtype)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_norms(weight_dtype: torch.dtype) -> None:
    x, residual, bias = randn(300, 4096), randn(300, 4096, seed=1), randn(4096, dtype=weight_dtype, seed=3)
    weight = 1.0 + 0.1 * randn(4096, dtype=weight_dtype, seed=2)
    close = dict(rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **close)
    want, stream = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got, same = norm.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(same, stream, rtol=0, atol=0)
    torch.testing.assert_close(got, want, **close)
    got, want = (k.layer_norm(x, weight, bias, 1e-5) for k in (norm, reference))
    torch.testing.assert_close(got, want, **close)
    want, stream = reference.add_layer_norm(x, residual.clone(), weight, None, 1e-5)
    got, same = norm.add_layer_norm(x, residual, weight, None, 1e-5)
    torch.testing.assert_close(same, stream, rtol=0, atol=0)
    torch.testing.assert_close(got, want, **close)


def test_activations() -> None:
    wide = 4 * randn(300, 2 * 14336)
    wide[0, :3] = torch.tensor([-200.0, 200.0, -9.0])
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        got, want = (getattr(kernels_of, name)(wide) for kernels_of in (activation, reference))
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)
    # tanh by the device's approximate exp2 and division, near 0 and far from it.
    logits = torch.logspace(-30, 4, 1100, device="cuda") * torch.tensor([[1.0], [-1.0]], device="cuda")
    want = 30.0 * (logits.double() / 30.0).tanh()
    torch.testing.assert_close(activation.softcap(logits, 30.0).double(), want, rtol=1e-6, atol=0)
    odd = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan")]], device="cuda")
    torch.testing.assert_close(activation.softcap(odd.clone(), 5.0), 5 * (odd / 5).tanh(), equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot", "weight_dtype"),
    [
        (16, 8, 128, 128, torch.bfloat16),
        (4, 1, 256, 256, torch.float32),
        (5, 1, 96, 72, torch.float32),
        (32, 32, 80, 32, None),
    ],
)
def test_rotary_and_write_kv(
    heads: int, kv_heads: int, dim: int, rot: int, weight_dtype: torch.dtype | None
) -> None:
    rows = 300
    angle = torch.arange(500, device="cuda")[:, None] * 1e4 ** -torch.linspace(0, 1, rot // 2, device="cuda")
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    positions = torch.randint(0, 500, (rows,), device="cuda")
    slots = torch.randperm(40 * 16, device="cuda")[:rows]
    slots[5] = -1
    weights = [weight_dtype and randn(dim, dtype=weight_dtype, seed=seed) for seed in (1, 2)]
    qkv = randn(rows, heads + 2 * kv_heads, dim)
    q, k, v = qkv.clone().split([heads, kv_heads, kv_heads], 1)
    if weight_dtype:
        q, k = reference.rms_norm(q, weights[0], 1e-6), reference.rms_norm(k, weights[1], 1e-6)
    reference.rotary(q, k, cos_sin, positions)
    cache = torch.full((40, 2, kv_heads, 16, dim), -7.0, device="cuda").bfloat16()
    got_q, got_k, got_v = qkv.split([heads, kv_heads, kv_heads], 1)
    rotary_kv.rotary_and_write_kv(got_q, got_k, got_v, cos_sin, positions, cache, slots, *weights, 1e-6)
    torch.testing.assert_close(got_q, q, rtol=1.6e-2, atol=3e-2)
    torch.testing.assert_close(got_k, k, rtol=1.6e-2, atol=3e-2)
    kept = slots >= 0
    block, offset = slots[kept] // 16, slots[kept] % 16
    assert torch.equal(cache[block, 0, :, offset], got_k[kept])
    assert torch.equal(cache[block, 1, :, offset], got_v[kept])
    assert int((cache == -7.0).all(-1).sum()) == (40 * 16 - int(kept.sum())) * 2 * kv_heads


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling(rows: int, dtype: torch.dtype) -> None:
    vocab = 49152
    g = torch.Generator("cuda").manual_seed(rows)
    logits = (3 * torch.randn(rows, vocab, generator=g, device="cuda")).to(dtype)
    top = logits.float().amax(-1, keepdim=True)
    lowest = torch.where(logits.float() == top, torch.arange(vocab, device="cuda"), vocab).amin(-1)
    assert torch.equal(sampling.argmax(logits), lowest)
    temperature = torch.rand(rows, generator=g, device="cuda") + 0.5
    temperature[::3] = 0
    k0, k1 = (torch.randint(0, 2**32, (rows,), generator=g, device="cuda") for _ in range(2))
    got = sampling.gumbel_argmax(logits, temperature, k0, k1)
    assert torch.equal(got[::3], lowest[::3])
    # The device's PyTorch rounds logarithms otherwise than we do: compare by score, in float64.
    noise = reference_sampling.gumbel_noise(
        torch.arange(vocab, dtype=torch.int32)[None], k0.cpu()[:, None], k1.cpu()[:, None]
    ).cuda()
    hot = temperature > 0
    score = logits[hot].double() / temperature[hot, None] + noise[hot]
    assert bool((score.gather(1, got[hot, None])[:, 0] >= score.amax(-1) - 1e-4).all())
