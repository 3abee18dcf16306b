"""Experts on a device: real tile shapes, graphs, equal bits every time, times beside what they must take."""

# Without a device nothing may be imported that defines kernels (tests/kernels interprets them).
# ruff: noqa: E402

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo.kernels import reference_moe
from octavo.kernels.triton import moe
from tests.kernels import moe_cases

QWEN = (128, 8, 2048, 768)  # experts, top_k, hidden, inner of Qwen3-30B-A3B
MIXTRAL = (8, 2, 4096, 14336)
LAYERS = 4  # sets of rows that are timed one after the other, so that caches hold little of the next


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, torch.bfloat16), (300, torch.bfloat16), (5, torch.float16), (1, torch.float32), (40, torch.float32)],
)
@pytest.mark.parametrize("among", [None, 3])
def test_odd_sizes(rows: int, dtype: torch.dtype, among: int | None) -> None:
    case = moe_cases.make(rows, 12, 3, 200, 72, dtype, "cuda", among)
    assert moe_cases.error(moe.experts(*case), case) < moe_cases.TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_experts_of_other_ranks_add_nothing(rows: int) -> None:
    case = moe_cases.make(rows, 12, 3, 200, 72, torch.float16, "cuda")
    whole = torch.zeros(rows, 200, device="cuda")
    for borders in ((0, 4), (4, 11), (11, 12)):
        part = moe_cases.of_a_rank(case, *borders)
        got = moe.experts(*part)
        assert (got - moe_cases.wanted(part)).abs().max() < 0.05
        whole += got
    assert moe_cases.error(whole, case) < 2 * moe_cases.TOLERANCE[torch.float16]


def test_route() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(1000, 256, generator=g, device="cuda")
    bias = torch.rand(256, generator=g, device="cuda")
    for settings in (
        {"top_k": 8},
        dict(top_k=8, sigmoid=True, scale=2.5, bias=bias, num_groups=8, top_groups=4, sum_top2=True),
    ):
        weights, experts = moe.route(logits, **settings)
        want_weights, want = reference_moe.route(logits, **settings)
        # Scores that round otherwise may change places.
        same = (experts.sort(1).values == want.sort(1).values).all(1)
        assert int((~same).sum()) <= 2
        torch.testing.assert_close(weights[same].sum(1), want_weights[same].sum(1), rtol=1e-4, atol=1e-6)


def test_a_recorded_graph_serves_other_choices_with_equal_bits() -> None:
    """The table of tiles is made anew by each replay, within the bound that the recording knew."""
    cases = [moe_cases.make(48, 64, 4, 256, 128, torch.bfloat16, "cuda", among, 1) for among in (None, 5, 60)]
    w13, w2 = (torch.randn_like(w) * 0.1 for w in cases[0][1:3])
    x, weights, chosen = (torch.empty_like(cases[0][i]) for i in (0, 3, 4))
    chosen.zero_()
    moe.experts(x, w13, w2, weights, chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.experts(x, w13, w2, weights, chosen)
    for case in cases:
        for held, new in ((x, case.x), (weights, case.weights), (chosen, case.chosen)):
            held.copy_(new)
        graph.replay()
        first = out.clone()
        assert moe_cases.error(first, case._replace(w13=w13, w2=w2)) < moe_cases.TOLERANCE[torch.bfloat16]
        for _ in range(50):
            graph.replay()
            assert torch.equal(out, first)


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Of one call, as a graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


@functools.cache
def limits() -> tuple[float, float]:
    """Bytes a second of a copy and operations a second of a large product on this device."""
    source = torch.zeros(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 2 / seconds(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return bandwidth, 2 * 8192**3 / seconds(lambda: a @ a, 5)


@pytest.mark.parametrize("shape", [QWEN, MIXTRAL], ids=["qwen3-30b-a3b", "mixtral-8x7b"])
def test_report(shape: tuple[int, int, int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """Times of one layer's experts in bfloat16, beside the larger of bytes / bandwidth and work / peak."""
    num_experts, top_k, hidden, inner = shape
    bandwidth, peak = limits()
    lines = [f"{shape}: {bandwidth / 1e12:.2f} TB/s, {peak / 1e12:.0f} TFLOP/s"]
    ratios = {}
    for rows in (1, 8, 32, 256, 4096):
        count = LAYERS if rows <= 32 else 1
        first = moe_cases.make(rows, num_experts, top_k, hidden, inner, torch.bfloat16, "cuda")
        # One set of weights serves all (of many experts, each set of rows takes others).
        g = torch.Generator("cuda").manual_seed(rows)
        w13 = torch.randn(first.w13.shape, dtype=torch.bfloat16, generator=g, device="cuda") * hidden**-0.5
        w2 = torch.randn(first.w2.shape, dtype=torch.bfloat16, generator=g, device="cuda") * 2 * inner**-0.5
        logits = [torch.randn(rows, num_experts, generator=g, device="cuda") for _ in range(count)]
        chosen = [moe.route(x, top_k)[1] for x in logits]
        cases = [first._replace(w13=w13, w2=w2, chosen=c) for c in chosen]
        error = moe_cases.error(moe.experts(*cases[0]), cases[0])
        assert error < moe_cases.TOLERANCE[torch.bfloat16]
        time = seconds(lambda cases=cases: [moe.experts(*case) for case in cases]) / count
        hit = sum(len(c.unique()) for c in chosen) / count
        floor = max(hit * 6 * hidden * inner / bandwidth, rows * top_k * 6 * hidden * inner / peak)
        routing = seconds(lambda logits=logits: [moe.route(x, top_k) for x in logits]) / count
        ratios[rows] = time / floor
        lines.append(
            f"rows {rows:5d}: {hit:5.1f} experts, {time * 1e6:8.1f} µs, floor {floor * 1e6:8.1f} µs, "
            f"{time / floor:5.2f} times; choice {routing * 1e6:5.1f} µs; error {error:.1e}"
        )
        del first, w13, w2, cases
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert max(ratios[rows] for rows in (1, 8, 32)) < 3
    assert ratios[4096] < 4
