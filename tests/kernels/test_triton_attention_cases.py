"""Every attention kernel over head sizes, groups, block sizes, windows and caps; see attention_cases."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton import attention, cascade
from tests.kernels.attention_cases import CASES, Case, check_decode, check_prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that tiny batches need several of them, and splits of them."""
    monkeypatch.setattr(attention, "MIN_CHUNK", 16)
    monkeypatch.setattr(cascade, "MIN_CHUNK", 16)
    monkeypatch.setattr(attention, "decode_config", lambda *args: attention.TileConfig(0, 16, 1, 4))
    monkeypatch.setattr(attention, "prefill_config", lambda *args: attention.TileConfig(16, 16, 1, 4))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case) -> None:
    dtype = "float16" if case.dim in (96, 128) else "float32"
    check_decode(case, dtype, [(1, 37), (0, 0), (1, 1)], 3, DEVICE)
    check_decode(case, dtype, [(1, 18), (2, 21)], 1, DEVICE)
    check_prefill(case, dtype, [(7, 25), (0, 12), (3, 3), (1, 9)], DEVICE)
    if case.window is None:
        tokens = 32
        check_decode(case, dtype, [(1, 33), (1, 52), (1, 44)], 2, DEVICE, tokens // case.block)
