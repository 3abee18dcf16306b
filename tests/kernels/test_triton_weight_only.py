"""Triton's products of 16-bit rows with 8-bit weights against float64, and what is chosen for what."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import ops, reference_lowbit
from octavo.kernels.triton import weight_only, weight_only_choice
from octavo.kernels.triton.expand_bytes import expand_bytes
from octavo.kernels.triton.linear_choice import Shape
from octavo.kernels.triton.skinny_linear import SkinnyConfig, skinny_linear
from octavo.kernels.triton.tiles import TilesConfig
from octavo.kernels.triton.tiles_row import RowConfig
from octavo.kernels.triton.tiles_row_warps import WarpsConfig
from tests.kernels import bytes_cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("form", bytes_cases.FORMS)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_forms(form: str, kind: torch.dtype) -> None:
    """Scales of rows, groups and blocks; sizes that fill neither tiles nor blocks."""
    for size_in, size_out in ((320, 40), (192, 133)):
        case = bytes_cases.make(form, kind, size_in, size_out, DEVICE)
        assert torch.equal(expand_bytes(case.weight, case.scale, torch.float32), case.exact)
        for rows, splits, first in ((1, 1, True), (9, 2, True), (17, 1, False)):
            config = SkinnyConfig(16, 32, 2, 4, splits, 0, first)
            bytes_cases.check(case, rows, HALF, None, config, TOLERANCE[HALF])


@pytest.mark.parametrize("form", ["rows", "groups of 64", "blocks"])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gated(form: str, act: str) -> None:
    """Halves whose border lies within a block of scales."""
    case = bytes_cases.make(form, torch.float8_e4m3fn, 192, 312, DEVICE)
    for splits in (1, 2):
        config = SkinnyConfig(16, 64, 2, 4, splits)
        bytes_cases.check(case, 3, HALF, act, config, TOLERANCE[HALF])


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("act", [None, ops.silu_and_mul, torch.nn.functional.silu])
def test_choice(rows: int, dtype: torch.dtype, act: Any) -> None:
    case = bytes_cases.make("groups of 24", torch.int8, 192, 32, DEVICE)
    for form in (case, bytes_cases.make("groups of 64", torch.int8, 192, 32, DEVICE)):
        x = torch.randn(rows, 192, device=DEVICE).to(dtype)
        bias = torch.randn(32, device=DEVICE).to(dtype)
        got = weight_only.weight_only_linear(x, form.weight, form.scale, bias, act)
        want = reference_lowbit.weight_only_linear(x, form.weight, form.scale, bias, act)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_a_step_within_a_group() -> None:
    case = bytes_cases.make("groups of 64", torch.int8, 192, 16, DEVICE)
    x = torch.zeros(1, 192, device=DEVICE, dtype=HALF)
    with pytest.raises(ValueError, match="must share a scale, which 64 have"):
        skinny_linear(x, case.weight, None, None, SkinnyConfig(16, 128, 2, 4), case.scale)


@pytest.mark.parametrize("gated", [False, True])
def test_default_cuts_fill_a_device(gated: bool) -> None:
    """Never more memory than a multiprocessor has; programs for most of them; steps for every split."""
    for size_in, size_out in ((4096, 6144), (14336, 4096), (1024, 2048), (4096, 28672), (64, 64)):
        for rows in (1, 8, 16, 17, 64, 128, 256):
            cut = weight_only_choice.default_cut(rows, -(-size_in // 256), size_out, gated, 132)
            assert cut is not None
            matrices = 2 if gated else 1
            stage = cut.block_out * matrices * 128 + cut.tile_rows * 512
            assert stage * cut.stages <= 227 << 10
            assert cut.splits == 1 or -(-size_in // 256) >= 2 * cut.splits
            assert cut.tile_rows >= 8
    assert weight_only_choice.default_cut(257, 16, 4096, gated, 132) is None


def test_tables() -> None:
    """A cut holds for fewer rows than it says, and for shapes that are near; null is a choice, too."""
    shape = Shape(4096, 6144, False)
    table = {("int4", shape): {1: [64, 4, 2, 2, 16, 8], 128: None}}
    again = weight_only_choice.table_from_json(
        json.loads(weight_only_choice.table_to_json(table, "X", ["x"]))
    )
    assert again == table
    look_up = functools.partial(weight_only_choice.look_up, again)
    assert look_up("int4", 1, shape) == (True, [64, 4, 2, 2, 16, 8])
    assert look_up("int4", 2, Shape(4096, 4096, False)) == (True, None)
    assert look_up("int4", 129, shape) == (False, None)
    assert look_up("fp8", 1, shape) == (False, None)
    assert look_up("int4", 1, Shape(4096, 6144, True)) == (False, None)
    assert look_up("int4", 1, Shape(512, 1024, False)) == (False, None)


def test_tables_that_ship() -> None:
    """Each cut is one that its kernel takes."""
    folder = Path(weight_only_choice.__file__).parent / "tuned" / "weight_only"
    for path in folder.glob("*.json"):
        for (form, shape), cuts in weight_only_choice.table_from_json(json.loads(path.read_text())).items():
            for rows, entry in cuts.items():
                if entry is None:
                    continue
                if form.endswith(("row", "norm")):
                    cut = weight_only_choice.row_cut(entry)
                    if isinstance(cut, WarpsConfig):
                        assert cut.outputs in (16, 32, 64) and cut.serves(shape.size_in), (path.name, form)
                        assert form.endswith("row") and not shape.gated, (path.name, form)
                        continue
                    assert form.endswith("row") or cut.splits == 1, (path.name, form)
                    assert cut.block_out in (16, 32, 64, 128, 256), (path.name, form)
                    continue
                kind = {"int4": TilesConfig, "nf4": TilesConfig}.get(form, SkinnyConfig)
                assert kind(*entry).block_out in (16, 32, 64, 128, 256), (path.name, rows)


def test_one_row_has_one_of_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table, whose cuts of warps are for one shape; where there is no table, by a rule."""
    qkv, down = Shape(4096, 6144, False), Shape(14336, 4096, False)
    table = {
        ("int4 row", qkv): {1: ["warps", [16, 16, 0, 0]], 2: [32, 6, 1, 4, 16]},
        ("int4 row", down): {1: ["warps", [32, 8, 3, 64]]},
        ("nf4 row", qkv): {1: [64, 4, 2, 4, 16]},
        ("int4 norm", qkv): {1: None},
    }

    def measured(form: str, rows: int, shape: Shape, device: torch.device) -> tuple[bool, Any]:
        return weight_only_choice.look_up(table, form, rows, shape)

    monkeypatch.setattr(weight_only_choice, "_measured", measured)
    device = torch.device("cpu")

    def chosen(form: str, size_in: int, size_out: int, norm: bool = False) -> RowConfig | WarpsConfig | None:
        return weight_only_choice.row_config.__wrapped__(form, size_in, size_out, False, norm, device)

    def default(size_in: int, size_out: int, norm: bool = False) -> RowConfig:
        return weight_only_choice.default_row_config(size_in, size_out, False, norm, 4)

    assert chosen("int4", 4096, 6144) == WarpsConfig(16, 16)
    assert chosen("int4", 14336, 4096) == WarpsConfig(32, 8, 3, 64)
    assert chosen("int4", 2048, 6144) == RowConfig(32, 6, 1, 4, 16)
    assert chosen("int4", 16384, 4096) == default(16384, 4096)
    assert chosen("int4", 64, 64) == default(64, 64)
    assert chosen("nf4", 4096, 6144) == RowConfig(64, 4, 2, 4, 16)
    assert chosen("int4", 4096, 6144, True) is None
    assert chosen("nf4", 4096, 6144, True) == default(4096, 6144, True)
