"""Products in oneDNN's layout: any number of rows, in pieces of few sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.quantization import packed_linear as module
from octavo.quantization.packed_linear import SIZES, pack, packed_linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def test_sizes_are_few_and_near():
    assert len(SIZES) < 48 and SIZES[-1] == 2048 and sorted(set(SIZES)) == list(SIZES)
    assert all(b <= 1.25 * a for a, b in zip(SIZES[4:], SIZES[5:], strict=False))


@pytest.mark.parametrize("rows", [0, 1, 2, 9, 33, 65, 129, 2047, 2049, 4100])
@pytest.mark.parametrize("bias", [True, False])
def test_any_number_of_rows(rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    met = []
    product = module._product
    monkeypatch.setattr(module, "_product", lambda x, *rest: met.append(len(x)) or product(x, *rest))
    x, weight = torch.randn(rows, 24), torch.randn(40, 24)
    b = torch.randn(40) if bias else None
    got = packed_linear(x, pack(weight), b)
    torch.testing.assert_close(got, F.linear(x, weight, b), rtol=1e-5, atol=1e-5)
    assert set(met) <= set(SIZES)
