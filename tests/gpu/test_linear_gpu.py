"""Products of few rows on a device: real shapes, launches that overlap, graphs, equal bits every time."""

# Without a device nothing may be imported that defines kernels (tests/kernels interprets them).
# ruff: noqa: E402

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo.kernels.triton import activation, linear, linear_choice, norm
from octavo.kernels.triton.linear_choice import Choice, Shape
from octavo.kernels.triton.skinny_linear import SkinnyConfig, skinny_linear
from octavo.kernels.triton.workspace import workspace
from tests.kernels import skinny_cases

bf16 = torch.bfloat16
DEVICE = torch.device("cuda", torch.cuda.current_device())
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CONFIGS = [
    SkinnyConfig(64, 128, 4, 4, 1, 32),
    SkinnyConfig(32, 128, 4, 4, 4, 64),
    SkinnyConfig(16, 256, 4, 4, 2, 16),
    SkinnyConfig(64, 64, 4, 8, 3, 32, False),
    SkinnyConfig(32, 128, 4, 4, 2, 32, False, 64),
    SkinnyConfig(64, 128, 3, 4, 2, 32, True, 64),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 65, 128])
@pytest.mark.parametrize("act", [None, "silu", "gelu_tanh"])
def test_odd_sizes(rows: int, act: str | None, config: SkinnyConfig) -> None:
    if act:
        config = config._replace(block_out=max(16, config.block_out // 2))
    for size_in, size_out, dtype in [(1000, 200, bf16), (577, 77, torch.float16), (64, 1, bf16)]:
        case = skinny_cases.make(rows, size_in, size_out, act, True, dtype, "cuda", pad=8)
        got = skinny_linear(case.x, case.weight, case.bias, act, config)
        assert skinny_cases.error(got, case) < TOLERANCE[dtype]
    assert not workspace(DEVICE).counters.any()


@pytest.mark.parametrize("config", CONFIGS[-2:])
@pytest.mark.parametrize("rows", [129, 200, 256])
def test_tiles_of_rows(rows: int, config: SkinnyConfig) -> None:
    for act, size_in, size_out in [(None, 1000, 200), ("silu", 1024, 512)]:
        case = skinny_cases.make(rows, size_in, size_out, act, True, torch.bfloat16, "cuda", pad=8)
        got = skinny_linear(case.x, case.weight, case.bias, act, config)
        assert skinny_cases.error(got, case) < TOLERANCE[torch.bfloat16]
    assert not workspace(DEVICE).counters.any()


def test_float32() -> None:
    for weights_first in (True, False):
        case = skinny_cases.make(5, 500, 100, None, True, torch.float32, "cuda")
        got = skinny_linear(
            case.x, case.weight, case.bias, None, SkinnyConfig(16, 32, 2, 4, 2, 0, weights_first)
        )
        assert skinny_cases.error(got, case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("config", CONFIGS)
def test_overlapping_launches(config: SkinnyConfig) -> None:
    """A chain in which each launch reads what the one before wrote, and shares its scratch: as one by one,
    from a graph, and every time."""
    torch.manual_seed(0)
    rows, size = 32, 1024
    ups = [torch.randn(2048, size, device=DEVICE).bfloat16() * size**-0.5 for _ in range(12)]
    downs = [torch.randn(size, 1024, device=DEVICE).bfloat16() * 0.03 for _ in range(12)]
    start = torch.randn(rows, size, device=DEVICE).bfloat16()
    factor = torch.ones(size, device=DEVICE).bfloat16()

    def chain(wait: bool) -> torch.Tensor:
        x = start
        for up, down in zip(ups, downs, strict=True):
            x = norm.rms_norm(x, factor, 1e-5)
            inner = skinny_linear(
                x, up, None, "silu", config._replace(block_out=max(16, config.block_out // 2))
            )
            if wait:
                torch.cuda.synchronize()
            x = skinny_linear(inner, down, None, None, config)
            if wait:
                torch.cuda.synchronize()
        return x

    want = chain(True)
    assert want.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(False)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)
    assert not workspace(DEVICE).counters.any()


FEW_ROWS_CUTS = [
    (4, 1024, 4),
    (8, 512, 2, 1, 4),
    (8, 1024, 4, 1, 2, 2),
    (4, 512, 2, 1, 3, 30),
    (2, 4096, 8, 3, 1, 2),
]


@pytest.mark.parametrize("cut", FEW_ROWS_CUTS)
@pytest.mark.parametrize("act", [None, "silu"])
def test_few_rows_that_send_ahead(act: str | None, cut: tuple[int, ...]) -> None:
    """Several steps held, weights sent for: in a chain of launches that overlap, from a graph, every time."""
    torch.manual_seed(0)
    size_in, size_out = 2048 if cut[1] < 4096 else 4000, 2050
    weights = [torch.randn(size_out, size_in, device=DEVICE).bfloat16() for _ in range(8)]
    factor = torch.ones(size_in, device=DEVICE).bfloat16()
    for rows in (1, 3):
        xs = [torch.randn(rows, size_in, device=DEVICE).bfloat16() * size_in**-0.5 for _ in weights]

        def chain(xs: list[torch.Tensor] = xs) -> torch.Tensor:
            outs = []
            for x, weight in zip(xs, weights, strict=True):
                outs.append(linear.few_rows_linear(norm.rms_norm(x, factor, 0.0), weight, None, cut, act))
            return torch.stack(outs)

        for got, x, weight in zip(chain(), xs, weights, strict=True):
            want = F.linear(norm.rms_norm(x, factor, 0.0), weight)
            want = activation.silu_and_mul(want) if act else want
            assert (got - want).float().norm() < 6e-3 * want.float().norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        want = chain()
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want)


def _product(choice: Choice, x: torch.Tensor, weight: torch.Tensor, act: str | None) -> torch.Tensor:
    if choice.kind == "few_rows":
        return linear.few_rows_linear(x, weight, None, choice.config, act)
    assert isinstance(choice.config, SkinnyConfig)
    return skinny_linear(x, weight, None, act, choice.config)


def _shapes() -> list[Shape]:
    """Those of the tables that ship, and neighbours of theirs."""
    found = []
    for path in (Path(linear_choice.__file__).parent / "tuned").glob("*.json"):
        found += list(linear_choice.table_from_json(json.loads(path.read_text())))
    return [s for s in dict.fromkeys(found) if s.size_out < 100_000] + [
        Shape(2560, 3840, False),
        Shape(576, 1536, False),
        Shape(1536, 17920, True),
        Shape(96, 64, False),
    ]


@pytest.mark.parametrize("shape", _shapes(), ids=str)
def test_choices(shape: Shape) -> None:
    """What is chosen runs on this device and agrees with PyTorch."""
    weight = torch.randn(shape.size_out, shape.size_in, device=DEVICE).bfloat16() * shape.size_in**-0.5
    for rows in (1, 2, 4, 7, 16, 32, 50, 64, 96, 128):
        choice = linear_choice.choose(rows, *shape, DEVICE)
        if choice.kind == "cublas":
            continue
        x = torch.randn(rows, shape.size_in, device=DEVICE).bfloat16()
        want = F.linear(x, weight)
        if shape.gated:
            want = activation.silu_and_mul(want)
        got = _product(choice, x, weight, "silu" if shape.gated else None)
        assert (got - want).float().norm() < 6e-3 * want.float().norm(), (rows, choice)
