"""The Triton kernels that prepare a step against their plain twins (interpreted where there is no GPU)."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.batch_cases import COUNTS, check

pytest.importorskip("triton")


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("counts", COUNTS)
def test_steps_equal_the_plain_twin(counts, block_size):
    from octavo.kernels.triton import batch

    check(batch, counts, block_size, "cuda" if torch.cuda.is_available() else "cpu")
