"""Weights of 8 and 4 bits beside 16-bit rows on a device: real sizes, odd ones, every kernel, graphs.

Most of the time goes into compilation: several processes (`-n 8`) help.
"""

# Without a device nothing may be imported that defines kernels (tests/kernels interprets them).
# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo.kernels import ops
from octavo.kernels.triton import expand_bytes, tiles, weight_only
from octavo.kernels.triton.skinny_linear import SkinnyConfig
from octavo.kernels.triton.tiles import TilesConfig
from octavo.kernels.triton.tiles_row import RowConfig
from octavo.kernels.triton.tiles_row_warps import WarpsConfig
from octavo.kernels.triton.workspace import workspace
from tests.kernels import bytes_cases, tiles_cases
from tests.kernels.poison import poison
from tests.quantization import checkpoints

bf16, fp16 = torch.bfloat16, torch.float16
DEVICE = torch.device("cuda", torch.cuda.current_device())
TOLERANCE = {fp16: 4e-3, bf16: 2e-2}
# Of Llama-8B and Qwen3-0.6B: columns, rows, whether they are a gate and what is gated.
SHAPES = [
    (4096, 6144, False), (4096, 28672, True), (14336, 4096, False),
    (1024, 4096, False), (1024, 6144, True), (3072, 1024, False),
]  # fmt: skip
ROWS = (1, 3, 8, 32, 100, 512)
FORMS = ["int4 128", "int4 128 zeros", "nf4 64", "int8 rows", "fp8 rows", "fp8 blocks", "int8 groups of 128"]
CUTS = [
    TilesConfig(16, 4, 1, 1, 16, 8), TilesConfig(64, 4, 2, 2, 8, 8), TilesConfig(64, 3, 4, 3, 0, 16),
    TilesConfig(64, 3, 4, 1, 0, 32), TilesConfig(128, 2, 4, 2, 4, 64), TilesConfig(128, 2, 8, 1, 0, 64),
]  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs and scratch hold NaN until they are written; counters end at zero."""
    poison(monkeypatch, DEVICE)
    yield
    assert not workspace(DEVICE).counters.any()


class Matrix:
    """A matrix of a form: `linear` multiplies by it, `exact` float32 `[out, in]` is what it means."""

    def __init__(self, form: str, size_in: int, size_out: int):
        self.form = form
        if form.startswith(("int4", "nf4")):
            case = tiles_cases.make(form, size_in, size_out, "cuda")
            self.exact, self.tiles = case.weight, case.tiles
        else:
            kind, _, scales = form.partition(" ")
            dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
            self.codes = bytes_cases.make(scales, dtype, size_in, size_out, "cuda")
            self.exact = self.codes.exact

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, act: Any) -> torch.Tensor:
        if self.form.startswith(("int4", "nf4")):
            return weight_only.tiles_linear(x, self.tiles, bias, act)
        return weight_only.weight_only_linear(x, self.codes.weight, self.codes.scale, bias, act)


def wanted(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor, gated: bool) -> torch.Tensor:
    """In float64."""
    want = x.double() @ matrix.exact.double().T + bias.double()
    if gated:
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    return want


def check(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    assert float((got.double() - want).abs().max() / want.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("form", "size_in", "size_out", "gated"),
    [
        *(("int4 128", *shape) for shape in SHAPES),
        *(("fp8 rows", *shape) for shape in SHAPES),
        *((form, *shape) for form in FORMS[1:] for shape in SHAPES[3:5] if form != "fp8 rows"),
    ],
)
def test_models(form: str, size_in: int, size_out: int, gated: bool) -> None:
    """As chosen for each number of rows."""
    matrix = Matrix(form, size_in, size_out)
    act = ops.silu_and_mul if gated else None
    for rows in ROWS:
        x = torch.randn(rows, size_in, device="cuda").bfloat16()
        bias = torch.randn(size_out, device="cuda").bfloat16()
        check(matrix.linear(x, bias, act), wanted(matrix, x, bias, gated), bf16)


ODD = ((768, 77, None), (576, 312, "silu"))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, bf16) for form in tiles_cases.FORMS), ("int4 64 zeros", fp16), ("nf4 64", fp16)],
)
def test_cuts_of_tiles(form: str, dtype: torch.dtype) -> None:
    """Sizes that fill nothing evenly; rows that lie apart; scales of the other 16-bit type."""
    first = tiles_cases.FORMS.index(form)
    for place, (size_in, size_out, act) in enumerate(ODD):
        case = tiles_cases.make(form, size_in, size_out, "cuda", bf16 if dtype == fp16 else fp16)
        assert torch.equal(tiles.expand_tiles(case.tiles, size_in, torch.float32), case.weight)
        whole = tiles.expand_tiles(case.tiles, size_in, dtype)
        assert torch.equal(whole, case.weight.to(dtype))
        for rows in (1, 9, 70):
            config = CUTS[(first + 3 * place) % len(CUTS)]
            tiles_cases.check(case, rows, dtype, act, config, TOLERANCE[dtype])


@pytest.mark.parametrize("form", tiles_cases.FORMS)
def test_one_row(form: str) -> None:
    """Alone, and behind a norm."""
    for size_in, size_out, act in ODD:
        case = tiles_cases.make(form, size_in, size_out, "cuda")
        for block_out, warps, norm, stream, splits in (
            (32, 2, False, False, 2), (16, 1, True, False, 1), (32, 2, True, True, 1),
        ):  # fmt: skip
            config = RowConfig(block_out, 4, warps, splits, 8)
            tiles_cases.check_row(case, bf16, act, config, norm, stream, TOLERANCE[bf16])


@pytest.mark.parametrize("form", tiles_cases.FORMS)
def test_one_row_by_warps(form: str) -> None:
    """The cuts that the table has, at their sizes and at odd ones."""
    for size_in, size_out in ((768, 77), (4096, 6144), (14336, 4096)):
        case = tiles_cases.make(form, size_in, size_out, "cuda")
        for config in (WarpsConfig(16, 16), WarpsConfig(32, 8, 3, 64), WarpsConfig(16, 4, 2, 8)):
            if config.serves(size_in):
                tiles_cases.check_row_warps(case, bf16, config, size_in == 768, TOLERANCE[bf16])
    tiles_cases.check_row_warps(case, fp16, WarpsConfig(32, 8, 3, 64), False, TOLERANCE[fp16])


def test_one_row_by_the_table() -> None:
    """As layers call it, where the table has either kernel."""
    for size_in, size_out in ((4096, 6144), (4096, 4096), (14336, 4096)):
        case = tiles_cases.make("int4 128", size_in, size_out, "cuda")
        x = torch.randn(1, size_in, device="cuda").bfloat16()
        got, want = weight_only.tiles_linear(x, case.tiles), x.double() @ case.weight.double().T
        assert float((got.double() - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_before_one_row(gated: bool) -> None:
    """As layers call it, against the norm's kernel and the product's."""
    matrix = Matrix("int4 128", 4096, 6144)
    act = ops.silu_and_mul if gated else None
    x, residual = (torch.randn(1, 4096, device="cuda").bfloat16() for _ in range(2))
    weight = (0.5 + torch.rand(4096, device="cuda")).bfloat16()
    found = weight_only.rms_norm_tiles_linear(x, residual, weight, 1e-5, matrix.tiles, None, act)
    if found is None:
        pytest.skip("the table has the norm in a kernel of its own")
    normed, stream = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    want = matrix.linear(normed, None, act)
    assert torch.equal(found[1], stream)
    assert float((found[0] - want).float().norm() / want.float().norm()) < 1e-2
    assert weight_only.rms_norm_tiles_linear(x.half(), None, weight, 1e-5, matrix.tiles, None, act) is None


@pytest.mark.parametrize(
    ("form", "kind", "dtype"),
    [
        *((form, kind, bf16) for form in bytes_cases.FORMS for kind in (torch.int8, torch.float8_e4m3fn)),
        ("rows", torch.int8, fp16),
        ("blocks", torch.float8_e4m3fn, fp16),
    ],
)
def test_cuts_of_bytes(form: str, kind: torch.dtype, dtype: torch.dtype) -> None:
    for place, (size_in, size_out, act) in enumerate(ODD):
        case = bytes_cases.make(form, kind, size_in, size_out, "cuda")
        assert torch.equal(expand_bytes.expand_bytes(case.weight, case.scale, torch.float32), case.exact)
        assert torch.equal(expand_bytes.expand_bytes(case.weight, case.scale, dtype), case.exact.to(dtype))
        block_out, warps, first, tile_rows = ((32, 2, True, 8), (64, 4, True, 16), (64, 4, False, 64))[
            (place + bytes_cases.FORMS.index(form)) % 3
        ]
        for rows in (1, 9, 70):
            config = SkinnyConfig(block_out, 32, 3, warps, 2, 32, first, tile_rows)
            bytes_cases.check(case, rows, dtype, act, config, TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["int4 128", "nf4 64", "fp8 rows"])
def test_float32(form: str) -> None:
    matrix = Matrix(form, 1024, 256)
    x, bias = torch.randn(5, 1024, device="cuda"), torch.randn(256, device="cuda")
    want = wanted(matrix, x, bias, False)
    got = matrix.linear(x, bias, None)
    assert float((got.double() - want).abs().max() / want.abs().max()) < 1e-3  # TF32, where it is allowed


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize("name", ["w4a16", "gptq_desc_act", "awq", "bnb_nf4_nested", "w8a16", "moe_w4a16"])
def test_checkpoints(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole models, from the formats' own libraries, token by token and all at once."""
    monkeypatch.undo()  # caches must be finite where they are not written
    want = checkpoints.expected(name)
    model = checkpoints.load(name, bf16, device="cuda")
    got = checkpoints.logits(model, want["tokens"], chunk).cpu().float()
    assert checkpoints.spread(got, want["logits"]) < 0.06


@pytest.mark.parametrize("rows", [1, 8, 32, 200])
@pytest.mark.parametrize("form", ["int4 128", "int8 rows"])
def test_a_chain_in_a_graph(form: str, rows: int) -> None:
    """Each launch reads what the one before wrote, and shares its scratch: equal bits as one by one, and
    every time."""
    torch.manual_seed(0)
    ups = [Matrix(form, 1024, 2048) for _ in range(6)]
    downs = [Matrix(form, 1024, 1024) for _ in range(6)]
    start = torch.randn(rows, 1024, device="cuda").bfloat16()
    ones = torch.ones(1024, device="cuda").bfloat16()

    def chain(sync: bool) -> torch.Tensor:
        x = start
        for up, down in zip(ups, downs, strict=True):
            x = ops.rms_norm(x, ones, 1e-5)  # else it would grow without end
            for matrix, act in ((up, ops.silu_and_mul), (down, None)):
                x = matrix.linear(x, None, act)
                if sync:
                    torch.cuda.synchronize()
        return x

    want = chain(True).clone()
    assert bool(want.isfinite().all()) and float(want.float().std()) > 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(False)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = chain(False)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
