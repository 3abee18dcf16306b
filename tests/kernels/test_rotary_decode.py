"""Rotation, KV write and attention as one launch, against the kernels that do them one after the other."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton import attention, rotary_decode, rotary_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter has no bfloat16 products.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
CONTEXTS = [1, 2, 0, 17, 70, 129]  # the third request is padding: it has no row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "norm", "window", "softcap", "splits"),
    [  # shape: heads, KV heads, head size, rotated dimensions, block size
        ((4, 1, 64, 64, 16), None, None, None, 1),
        ((6, 6, 80, 32, 8), "model", None, None, 4),
        ((8, 2, 128, 128, 16), "float32", 24, 30.0, 3),
        ((16, 1, 96, 96, 32), "model", 24, None, 1),
        ((3, 1, 256, 64, 16), None, None, 30.0, 4),
    ],
)
def test_equals_the_separate_kernels(
    shape: tuple[int, ...],
    norm: str | None,
    window: int | None,
    softcap: float | None,
    splits: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tolerance = TOLERANCE[dtype]
    for module in (attention, rotary_decode):
        monkeypatch.setattr(module, "MIN_CHUNK", 32)  # so that short contexts are split
    rotary_decode._constants.cache_clear()
    heads, kv_heads, dim, rot_dim, block = shape
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)

    def random(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, kind)

    live = [c for c in CONTEXTS if c]
    columns = -(-max(CONTEXTS) // block)
    tables = torch.randperm(len(CONTEXTS) * columns, generator=generator).view(-1, columns).int().to(DEVICE)
    cache = random(tables.numel(), 2, kv_heads, block, dim)
    slots, positions, starts = [], [], [0]
    for i, context in enumerate(CONTEXTS):
        at = torch.arange(columns * block)
        ids = tables[i].cpu()[at // block].long()
        unknown = slice(max(context - 1, 0), None)  # what no step has written yet
        cache[ids[unknown], :, :, (at % block)[unknown]] = torch.nan
        starts.append(starts[-1] + (context > 0))
        if context:
            positions.append(context - 1)
            slots.append(int(ids[context - 1]) * block + (context - 1) % block)
    slots_d = torch.tensor(slots, device=DEVICE)
    positions_d = torch.tensor(positions, device=DEVICE)
    starts_d = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    lens = torch.tensor(CONTEXTS, dtype=torch.int32, device=DEVICE)
    qkv = random(len(live), (heads + 2 * kv_heads) * dim + 8)
    q, k, v = (
        part.unflatten(1, (-1, dim))
        for part in qkv[:, :-8].split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )
    cos_sin = random(max(CONTEXTS), rot_dim, kind=torch.float32)
    weights = [None, None]
    if norm is not None:
        weights = [random(dim, kind=torch.float32 if norm == "float32" else dtype) for _ in range(2)]
    sizes = attention.decode_workspace_sizes(len(CONTEXTS), kv_heads, heads // kv_heads, dim, 1, splits)
    partials = torch.full((max(1, sizes[0]),), torch.nan, device=DEVICE)
    counters = torch.zeros(sizes[1], dtype=torch.int32, device=DEVICE)
    scale = dim**-0.5

    want_cache, turned = cache.clone(), qkv.clone()
    tq, tk, tv = (
        part.unflatten(1, (-1, dim))
        for part in turned[:, :-8].split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )
    rotary_kv.rotary_and_write_kv(tq, tk, tv, cos_sin, positions_d, want_cache, slots_d, *weights, 1e-6)
    want = torch.full((len(live), heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    attention.paged_decode(
        tq, want_cache, want, starts_d, lens, tables, 0, len(CONTEXTS), 1, splits, partials, counters,
        scale, window, softcap,
    )  # fmt: skip

    before, got = qkv.clone(), torch.full_like(want, torch.nan)
    partials.fill_(torch.nan)
    rotary_decode.rotary_decode(
        q, k, v, cos_sin, positions_d, slots_d, cache, got, starts_d, lens, tables, len(CONTEXTS), splits,
        partials, counters, scale, window, softcap, *weights, 1e-6,
    )  # fmt: skip
    assert not counters.any() and torch.equal(qkv, before)
    assert torch.equal(cache.isnan(), want_cache.isnan())
    torch.testing.assert_close(cache, want_cache, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
