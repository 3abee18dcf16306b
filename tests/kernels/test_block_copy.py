"""Every way to move blocks agrees with the plain one (Triton's interpreted where there is no GPU)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from octavo.kernels.block_copy import PlainBlockCopier
from octavo.kernels.cuda_block_copy import BatchedBlockCopier, CopyAttributes
from tests.kernels.block_copy_cases import SHAPES, check


@pytest.mark.parametrize("shape", SHAPES)
def test_plain(shape):
    check(PlainBlockCopier, shape)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this")
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape):
    pytest.importorskip("triton")
    from octavo.kernels.triton.block_copy import KernelBlockCopier

    check(KernelBlockCopier, shape)


class Driver:
    """Copies what the driver would be told to copy, in any order; counts calls."""

    def __init__(self, code: int = 0):
        self.counts: list[int] = []
        self.code = code

    def __call__(self, to: int, source: int, sizes: int, count: int, stream: int) -> int:
        assert stream == 77
        self.counts.append(count)
        arrays = [
            np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(a)) for a in (to, source, sizes)
        ]
        for i in np.random.default_rng(count).permutation(count):
            ctypes.memmove(*(int(array[i]) for array in arrays))
        return self.code


@pytest.mark.parametrize("shape", [*SHAPES, (40, 16, 60, 60, 55)])
def test_copy_engines(shape):
    driver = Driver()
    check(lambda buffers, host: BatchedBlockCopier(buffers, host, driver, lambda: 77), shape)
    pieces = shape[0] * shape[4]
    assert driver.counts == [min(1024, pieces - at) for at in range(0, pieces, 1024)] * 2


def test_what_the_driver_refuses_is_an_error():
    copier = BatchedBlockCopier(
        [torch.zeros(2, 8, dtype=torch.uint8)], torch.zeros(2, 1, 8, dtype=torch.uint8), Driver(1), lambda: 77
    )
    with pytest.raises(RuntimeError, match="CUDA error 1 from cuMemcpyBatchAsync of 1 pieces"):
        copier.out(np.zeros(1, np.int32), np.ones(1, np.int32))


def test_attributes_have_the_drivers_layout():
    assert ctypes.sizeof(CopyAttributes) == 24
    offsets = {name: getattr(CopyAttributes, name).offset for name, _ in CopyAttributes._fields_}
    assert offsets == {"order": 0, "source": 4, "destination": 12, "flags": 20}
