"""Tokens that a mask leaves out, by the plain version and by Triton's, against a loop in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels import reference_sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _plain() -> tuple[Callable[..., Any], str]:
    return reference_sampling.forbid_tokens, "cpu"


def _triton() -> tuple[Callable[..., Any], str]:
    pytest.importorskip("triton")
    from octavo.kernels.triton import bitmask

    return bitmask.forbid_tokens, DEVICE


@pytest.mark.parametrize("kernel", [_plain, _triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 31, 4096, 9001])
def test_only_what_the_mask_leaves_out_changes(kernel, dtype, vocab):
    forbid, device = kernel()
    draw = np.random.default_rng(vocab)
    words = -(-vocab // 32)
    bits = draw.integers(-(1 << 31), 1 << 31, (3, words), dtype=np.int64).astype(np.int32)
    bits[1] = -1
    rows = [4, 0, 3]
    given = torch.randn(6, vocab + 5, generator=torch.Generator().manual_seed(vocab)).to(device, dtype)
    logits = given.clone()
    forbid(logits[:, :vocab], torch.tensor(rows, device=device), torch.from_numpy(bits).to(device))
    wanted = given.clone()
    for row, mask in zip(rows, bits.tolist(), strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> (token % 32) & 1:
                wanted[row, token] = float("-inf")
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("kernel", [_plain, _triton])
def test_no_rows(kernel):
    forbid, device = kernel()
    logits = torch.ones(2, 5, device=device)
    forbid(logits, torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, 1, dtype=torch.int32))
    assert torch.equal(logits, torch.ones(2, 5, device=device))
