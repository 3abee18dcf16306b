"""The C++ kernels that prepare a step against their plain twins."""

from __future__ import annotations

import pytest

from octavo.kernels.cpu import batch, ops
from tests.kernels.batch_cases import COUNTS, check


@pytest.mark.skipif(not ops.available(), reason=f"no CPU kernels: {ops.why_not()}")
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("counts", COUNTS)
def test_steps_equal_the_plain_twin(counts, block_size):
    check(batch, counts, block_size)
