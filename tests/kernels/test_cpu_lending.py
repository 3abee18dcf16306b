"""Tensors of large steps: the next step has the memory of those that are gone, and of no other."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.cpu import norm_act, ops
from octavo.kernels.cpu.lending import Lending

if not ops.available():
    pytest.skip("no CPU kernels", allow_module_level=True)


def work(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x
    for _ in range(5):
        y = norm_act.silu_and_mul(torch.cat((norm_act.rms_norm(y, weight, 1e-5), x), 1))
    return y, y[3:9]


def test_results_are_the_same_and_stay_while_they_are_held() -> None:
    random, lending = torch.Generator().manual_seed(1), Lending()
    weight = torch.rand(256, generator=random)
    inputs = [torch.randn(300, 256, generator=random) for _ in range(4)]
    want = [work(x, weight) for x in inputs]
    got = []
    for x in inputs:
        with lending:
            got.append(work(x, weight))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    held = lending.memory.num_bytes
    assert held <= (4 + 3) * inputs[0].nbytes
    got = [part[1:] for part in got]  # views of all of them
    del mine, theirs
    for _ in range(3):
        with lending:
            x = inputs[0]
            again = work(x, weight)
        assert torch.equal(again[0], want[0][0])
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine[0], theirs[1])
    del got, mine, again
    before = lending.memory.num_bytes
    for x in inputs * 3:
        with lending:
            work(x, weight)
    assert lending.memory.num_bytes == before  # nothing grows


def test_small_tensors_and_shapes_alone_are_left_alone() -> None:
    lending = Lending()
    with lending:
        small, shape = torch.empty(3, 4), torch.empty(1 << 20, device="meta")
        strided = torch.empty_strided((512, 256), (1, 512))
    assert small.shape == (3, 4) and shape.is_meta
    assert strided.stride() == (1, 512) and lending.memory.num_bytes == strided.nbytes
