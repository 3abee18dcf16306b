"""Triton's choice of experts and their products against the plain versions, in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import reference_moe
from octavo.kernels.triton import moe
from tests.kernels import moe_cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = moe.Tiles(16, moe.Block(16, 32, 4, 1), moe.Block(32, 16, 4, 1))

ROUTERS = [  # experts, top_k, further settings
    (8, 2, {}),
    (60, 4, {"renormalize": False}),
    (128, 8, {"scale": 1.5}),
    (7, 1, {"sigmoid": True}),
    (64, 6, {"num_groups": 8, "top_groups": 3, "renormalize": False, "scale": 16.0}),
    (20, 3, {"num_groups": 5, "top_groups": 2}),
    (
        48,
        5,
        {"num_groups": 6, "top_groups": 3, "sigmoid": True, "sum_top2": True, "bias": True, "scale": 2.5},
    ),
]


@pytest.mark.parametrize(("num_experts", "top_k", "settings"), ROUTERS)
def test_route(num_experts: int, top_k: int, settings: dict) -> None:
    dtype = torch.bfloat16 if num_experts % 3 else torch.float32
    g = torch.Generator().manual_seed(num_experts)
    # Distinct in bfloat16 too, as equals may be chosen in any order.
    logits = torch.stack([torch.randperm(256, generator=g)[:num_experts] for _ in range(5)]) / 32 - 4
    logits = logits.to(DEVICE, dtype)
    settings = dict(settings)
    if settings.get("bias"):
        settings["bias"] = torch.rand(num_experts, generator=g).to(DEVICE)
    wide = torch.cat([logits, torch.full_like(logits, 100.0)], 1)[:, :num_experts]
    want_weights, want = reference_moe.route(logits, top_k, **settings)
    for given in (logits, wide):
        weights, experts = moe.route(given, top_k, **settings)
        assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
        assert torch.equal(experts, want)
        torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)


def test_equals_and_nan_stay_among_the_experts() -> None:
    weights, experts = moe.route(torch.zeros(1, 6, device=DEVICE), 4)
    assert experts.tolist() == [[0, 1, 2, 3]] and weights.tolist() == [[0.25] * 4]
    weights, experts = moe.route(torch.full((1, 6), float("nan"), device=DEVICE), 4)
    assert bool(((experts >= 0) & (experts < 6)).all())
    assert moe.route(torch.zeros(0, 6, device=DEVICE), 4)[1].shape == (0, 4)


CASES = [  # rows, experts, top_k, hidden, inner, chosen among
    (1, 8, 2, 64, 32, None),
    (1, 128, 8, 16, 5, None),
    (2, 128, 5, 16, 3, None),
    (7, 4, 1, 24, 20, None),
    (5, 6, 3, 36, 40, 3),
    (40, 8, 2, 20, 24, 3),
    (50, 5, 1, 24, 16, 1),
    (4, 40, 8, 16, 8, 12),
    (0, 8, 2, 32, 16, None),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is NaN, or a number of no tile and no pair."""
    empty = torch.empty

    def make(*shape, **options):
        dtype = options.get("dtype", torch.float32)
        return empty(*shape, **options).fill_(float("nan") if dtype.is_floating_point else 1 << 30)

    monkeypatch.setattr(torch, "empty", make)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [(CASES[i], dtype) for i, dtype in ((0, torch.bfloat16), (0, torch.float16), (4, torch.float16))],
)
def test_experts(case: tuple[int, int, int, int, int, int | None], dtype: torch.dtype) -> None:
    given = moe_cases.make(*case[:5], dtype, DEVICE, case[5])
    # The interpreter has no product of bfloat16 tiles, and is slow with many experts.
    both = DEVICE == "cuda" or (dtype is not torch.bfloat16 and case[1] < 128)
    for tiles in (None, SMALL) if both else (None,):
        got = moe.experts(*given, tiles=tiles)
        assert got.dtype == dtype and got.shape == given.x.shape
        if case[0]:
            assert moe_cases.error(got, given) < 2 * moe_cases.TOLERANCE[dtype], tiles


@pytest.mark.parametrize("tiles", [None, SMALL])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_experts_of_other_ranks_add_nothing(rows: int, tiles: moe.Tiles | None) -> None:
    whole = torch.zeros(rows, 24, device=DEVICE)
    case = moe_cases.make(rows, 17, 3, 24, 16, torch.float32, DEVICE)
    for borders in ((0, 8), (8, 16), (16, 17)):  # 16 + 1 is more than a power of 2
        part = moe_cases.of_a_rank(case, *borders)
        got = moe.experts(*part, tiles=tiles)
        assert (got - moe_cases.wanted(part)).abs().max() < 1e-5
        whole += got
    assert moe_cases.error(whole, case) < 1e-6
    nothing = case._replace(chosen=torch.full_like(case.chosen, 17))
    assert not moe.experts(*nothing, tiles=tiles).any()


def test_strided_rows() -> None:
    given = moe_cases.make(4, 6, 2, 32, 16, torch.float32, DEVICE)
    wide = torch.cat([given.x, torch.full_like(given.x, float("nan"))], 1)[:, :32]
    for tiles in (None, SMALL):
        assert moe_cases.error(moe.experts(wide, *given[1:], tiles=tiles), given) < 1e-6


@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "m"),
    [(9, 4, 2, 64), (600, 5, 1, 16), (600, 5, 1, 64), (9, 128, 8, 16), (64, 1, 1, 16)],
)
def test_order_and_tiles(rows: int, num_experts: int, top_k: int, m: int) -> None:
    """Sorted, stable, cut at experts, within the bound, and the rest of the table marked."""
    g = torch.Generator().manual_seed(rows)
    chosen = (
        torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(rows)]).int().to(DEVICE)
    )
    order, table = moe.sort_pairs(chosen, num_experts, m)
    flat = chosen.flatten().long()
    assert torch.equal(order.long(), flat.argsort(stable=True))
    want = []
    for expert, count in enumerate(flat.bincount(minlength=num_experts).tolist()):
        first = int((flat < expert).sum())
        want += [[expert, first + i, first + count] for i in range(0, count, m)]
    assert len(want) <= len(table)
    assert table[: len(want), :3].tolist() == want
    assert set(table[len(want) :, 0].tolist()) <= {-1}


def test_the_bound_on_tiles_is_reached() -> None:
    for pairs, num_experts, m in [(8, 128, 16), (33, 3, 16), (64, 1, 16), (1000, 8, 64)]:
        hit = min(pairs, num_experts)
        # As many experts as possible with one pair more than fills their tiles.
        spare = pairs - hit
        counts = [1] * hit
        counts[0] += spare // m * m
        counts[-1] += spare % m
        assert sum(-(-c // m) for c in counts) <= moe.most_tiles(pairs, num_experts, m)
        counts = [1 + spare // m * m] + [1] * (hit - 1)
        assert sum(-(-c // m) for c in counts) == moe.most_tiles(pairs, num_experts, m)


def test_every_configuration_fits_small_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads in flight within the 99 KiB of consumer Ampere, with one stage at least."""
    monkeypatch.setattr(moe, "_shared_memory", lambda device: 101376)
    moe.tiles_for.cache_clear()
    for itemsize in (2, 4):
        for pairs in (1, 64, 256, 4096, 1 << 17):
            m, gate_up, down = moe.tiles_for(pairs, 32, itemsize, -1)
            for block, matrices in ((gate_up, 2), (down, 1)):
                stage = (m + matrices * block.n) * block.k * itemsize
                assert block.stages >= 1 and block.stages * stage <= 101376
    moe.tiles_for.cache_clear()
