"""Products with quantized matrices in every form of the kernels that this CPU runs, each built of its own."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from octavo.kernels.cpu import build, norm_act, products, quant
from octavo.kernels.cpu.signatures import SIGNATURES, declare
from octavo.kernels.reference_quant import dequantize
from tests.kernels.quant_cases import FORMATS, exact, exact_rows, matrix

if not quant.lanes():
    pytest.skip("no kernels for quantized matrices on this CPU", allow_module_level=True)

pytestmark = pytest.mark.slow  # compilations

# Flags beside the kernels' own, rows of a panel, and what the CPU must have.
FORMS = {
    "AVX-512 VNNI": ([], 16, "avx512_vnni"),
    "AVX-512 without VNNI": (["-mno-avx512vnni", "-mno-avxvnni"], 8, "avx512bw"),
    "AVX-VNNI": (["-mno-avx512f", "-mavxvnni"], 8, "avx_vnni"),
    "AVX-VNNI imitated": (["-mno-avx512f", "-mno-avxvnni", "-DOCTAVO_IMITATE_VNNI"], 8, "avx2"),
    "AVX2": (["-mno-avx512f", "-mno-avxvnni"], 8, "avx2"),
}
SOURCES = ("quant_linear", "quant_pack", "record", "runtime")
ROWS = (1, 2, 3, 4, 7, 10, 11, 12, 15, 99)  # of x: every size of a tile, and more than a piece of work


def features() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split(":")[1].split())


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The kernels in one form, in the place of the library's."""
    flags, lanes, needed = FORMS[request.param]
    if needed not in features():
        pytest.skip(f"this CPU has no {needed}")
    compiler, folder = build.find_compiler(), tmp_path_factory.mktemp("form")
    common = [*(x for x in build.FLAGS if x != "-O3"), "-O1", *flags]

    def compile_one(name: str) -> str:
        target = str(folder / f"{name}.o")
        source = str(build.SOURCE_DIR / f"{name}.cpp")
        subprocess.run([compiler, *common, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, SOURCES))
    target = str(folder / "form.so")
    subprocess.run([compiler, "-shared", "-Wl,-z,defs", *objects, "-o", target], check=True)
    library = ctypes.CDLL(target)
    declare(library, [name for name in SIGNATURES if name.startswith("octavo_quant_")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quant, "library", lambda: library)
        assert quant.lanes() == lanes
        yield request.param


@pytest.mark.parametrize("name", FORMATS)
def test_exact_products(form: str, name: str) -> None:
    """Where float32 holds every partial sum exactly, any order gives the product in double."""
    random = torch.Generator().manual_seed(1)
    for rows, columns in ((40, 96), (24, 1344)):
        weight = exact(FORMATS[name], rows, columns, random)
        packed, wide = quant.PackedMatrix([weight], columns), dequantize(weight).double()
        assert torch.equal(packed.look_up(torch.arange(rows), torch.float32).double(), wide)
        for n in ROWS:
            x = exact_rows(n, columns, random)
            assert torch.equal(packed.linear(x, None).double(), x.double() @ wide.T)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_alone_and_together(form: str, name: str) -> None:
    random = torch.Generator().manual_seed(2)
    packed = quant.PackedMatrix([matrix(FORMATS[name], 56, 704, random)], 704)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(99, 704, generator=random).to(dtype)
        whole = packed.linear(x, None)
        for first, last in ((0, 1), (5, 9), (20, 33)):
            assert torch.equal(packed.linear(x[first:last], None), whole[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_bias(form: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    packed = quant.PackedMatrix([matrix(FORMATS["q8"], 96, 160, random)], 160)
    tolerance = {"rtol": 2e-6 if dtype is torch.float32 else 2.0**-8, "atol": 1e-6}
    for n in (1, 3, 20):
        x = torch.randn(n, 160, generator=random).to(dtype)
        for bias in (None, torch.randn(96, generator=random).to(dtype)):
            whole = packed.linear(x, bias)
            for code, act in (
                (products.SILU, norm_act.silu_and_mul),
                (products.GELU_TANH, norm_act.gelu_tanh_and_mul),
            ):
                torch.testing.assert_close(packed.linear(x, bias, code), act(whole), **tolerance)


def test_values_that_are_not_finite_stay_in_their_rows(form: str) -> None:
    random = torch.Generator().manual_seed(4)
    packed = quant.PackedMatrix([matrix(FORMATS["q4-minimum"], 32, 96, random)], 96)
    x = torch.randn(20, 96, generator=random)
    want = packed.linear(x, None)
    x[3, 40], x[17, 0] = float("nan"), float("-inf")
    got = packed.linear(x, None)
    bad = torch.zeros(20, dtype=torch.bool)
    bad[[3, 17]] = True
    assert bool(got[bad].isnan().all())
    assert torch.equal(got[~bad], want[~bad])
