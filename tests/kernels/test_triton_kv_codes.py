"""Quantized KV caches in Triton's kernels: written bit for bit as the plain twins do, and attended to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton import attention, cascade
from tests.kernels.attention_cases import ALL_CODES, Case, Codes, check_decode, check_prefill
from tests.kernels.kv_write_cases import WRITE_CASES, WriteCase, check_gather, check_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that tiny batches need several of them, and splits of them."""
    monkeypatch.setattr(attention, "MIN_CHUNK", 16)
    monkeypatch.setattr(cascade, "MIN_CHUNK", 16)
    monkeypatch.setattr(attention, "quantized_decode_config", lambda *args: attention.TileConfig(0, 16, 1, 4))
    monkeypatch.setattr(attention, "prefill_config", lambda *args: attention.TileConfig(16, 16, 1, 4))


# Head sizes, groups, block sizes, windows and caps.
CODES_CASES = [
    Case(2, 2, 64, 8),
    Case(6, 2, 80, 16, window=21),
    Case(4, 1, 112, 32, softcap=8.0),
    Case(3, 3, 128, 16, window=13, softcap=5.0),
    Case(16, 1, 256, 8),
]


def taking_turns(cases: list[Any]) -> list[Any]:
    """Each case with two kinds of codes, each kind with others' cases: on a device all meet all."""
    kinds = len(ALL_CODES)
    return [(i, case, ALL_CODES[(i + 2 * k) % kinds]) for i, case in enumerate(cases) for k in range(2)]


@pytest.mark.parametrize(("number", "case", "codes"), taking_turns(CODES_CASES), ids=str)
def test_attention(small_tiles: None, number: int, case: Case, codes: Codes) -> None:
    dtype = ("bfloat16", "float16", "float32")[number % 3]
    check_decode(case, dtype, [(1, 37), (0, 0), (1, 1)], 3, DEVICE, codes=codes)
    check_prefill(case, dtype, [(7, 25), (0, 12), (1, 9)], DEVICE, codes=codes)
    if case.window is None:
        check_decode(case, dtype, [(1, 33), (1, 52), (1, 44)], 2, DEVICE, 32 // case.block, codes=codes)
    else:
        check_decode(case, dtype, [(1, 18), (2, 21)], 1, DEVICE, codes=codes)


@pytest.mark.parametrize(("number", "case", "codes"), taking_turns(WRITE_CASES), ids=str)
def test_writes_are_the_twins(number: int, case: WriteCase, codes: Codes) -> None:
    check_write(case, codes, DEVICE)


@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_writes_of_keys_less_a_vector_are_the_twins(case: WriteCase) -> None:
    for codes in ALL_CODES:
        if codes.kind != "int8":
            check_write(case, codes, DEVICE, centred=True)


@pytest.mark.parametrize("codes", ALL_CODES, ids=str)
def test_values_of_a_block_table(codes: Codes) -> None:
    check_gather(codes, DEVICE)
