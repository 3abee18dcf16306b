"""Regions of tensors as runs of bytes, against masks of their elements."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.quantization.shard import Region, Shard, byte_ranges
from octavo.quantization.stored_tensor import Axis, StoredTensor


def mask(regions: list[Region], itemsize: int) -> np.ndarray:
    """Which bytes of the tensor are some region's."""
    out = np.zeros(regions[0].shape, bool)
    for region in regions:
        out[tuple(slice(a, a + n) for a, n in zip(region.first, region.size, strict=True))] = True
    return out.reshape(-1).repeat(itemsize)


CASES = [
    [Region((6, 8), (2, 0), (3, 8))],
    [Region((6, 8), (0, 3), (6, 4))],
    [Region((6, 8), (1, 3), (2, 5))],
    [Region((6, 8), (0, 0), (6, 8))],
    [Region((6, 8), (0, 0), (1, 8)), Region((6, 8), (4, 0), (2, 8)), Region((6, 8), (1, 0), (1, 8))],
    [Region((4, 6, 8), (1, 2, 0), (2, 3, 8))],
    [Region((4, 6, 8), (1, 0, 4), (3, 6, 4))],
    [Region((6, 8), (1, 3), (2, 5)).of_stack(4, 3, 1)],
    [Region((5,), (2,), (2,))],
]


@pytest.mark.parametrize("regions", CASES)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_runs_are_the_regions_bytes(regions: list[Region], itemsize: int) -> None:
    want = mask(regions, itemsize)
    numel = want.size // itemsize
    for least in (1, 12, 10**6):
        runs = byte_ranges(regions, numel, itemsize, least)
        got = np.zeros_like(want)
        for offset, size in runs:
            assert size > 0 and not got[offset : offset + size].any()
            got[offset : offset + size] = True
        assert not (want & ~got).any()
        if least == 1:
            assert (want == got).all()
        assert runs == sorted(runs)
        assert all(a + n < b for (a, n), (b, _) in zip(runs, runs[1:], strict=False))  # else they were one


def test_nothing_all_and_other_sizes() -> None:
    assert byte_ranges([], 48, 2, 1) == []
    assert byte_ranges([Region((6, 8), (2, 0), (0, 8))], 48, 2, 1) == []
    assert byte_ranges([Region((6, 8), (2, 0), (3, 8))], 47, 2, 1) == [(0, 94)]
    assert byte_ranges([Region((), (), ())], 1, 4, 1) == [(0, 4)]


def test_a_stored_tensor_s_region_is_what_is_cut() -> None:
    """Whole entries where a border parts one."""
    import torch

    packed = StoredTensor((Axis("columns", 8), Axis("rows")))
    scales = StoredTensor((Axis("columns", 64, shared=True, least=32), Axis("rows")))
    shard = Shard(0, 10, 20, 96, 96)
    for stored, tensor in (
        (packed, torch.arange(24 * 40).view(24, 40)), (scales, torch.arange(3 * 40).view(3, 40))
    ):  # fmt: skip
        region = stored.region("m", 40, 192, shard)
        assert region is not None and region.shape == tuple(tensor.shape)
        box = tensor[tuple(slice(a, a + n) for a, n in zip(region.first, region.size, strict=True))]
        assert set(stored.cut("m", tensor, shard).flatten().tolist()) == set(box.flatten().tolist())
    assert StoredTensor((0,), any_size=True).region("m", 40, 192, shard) is None
