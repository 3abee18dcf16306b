"""Triton's argmax and Gumbel-max sampling against their plain twins."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from octavo.kernels import reference_sampling
from octavo.kernels.triton import logprobs, sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _noise_kernel(out_ptr, k0, k1, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(out_ptr + cols, sampling._gumbel(cols, k0.to(tl.uint32), k1.to(tl.uint32)))


@triton.jit
def _log_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(out_ptr + cols, sampling._log(tl.load(x_ptr + cols)))


def test_log_is_accurate_where_the_noise_is_decided() -> None:
    x = torch.cat(
        [
            1 - torch.arange(1, 1025) * 2.0**-24,  # the largest draws
            torch.rand(1024, generator=torch.Generator().manual_seed(0)).clamp_min(1e-6),
            torch.logspace(-7.5, 1.5, 2048),
        ]
    ).to(DEVICE)
    out = torch.empty_like(x)
    _log_kernel[(1,)](x, out, BLOCK=4096)
    want = x.double().log()
    assert float(((out.double() - want).abs() / want.abs().clamp_min(1e-30)).max()) < 2.4e-7


def test_noise_is_the_twins() -> None:
    for k0, k1 in [(0, 0), (2**32 - 1, 123), (0x9E3779B9, 2**31)]:
        out = torch.empty(1024, device=DEVICE)
        keys = torch.tensor([k0, k1], device=DEVICE)
        _noise_kernel[(1,)](out, k0, k1, BLOCK=1024)
        index = torch.arange(1024, dtype=torch.int32, device=DEVICE)
        torch.testing.assert_close(
            out, reference_sampling.gumbel_noise(index, keys[0], keys[1]), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("vocab", [7, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab + 3, generator=torch.Generator().manual_seed(vocab)).to(DEVICE, dtype)[
        :, :vocab
    ]
    logits[1, [2, 5, vocab - 1]] = 50.0  # of equals the lowest
    logits[2] = -3.0
    logits[3] = float("-inf")
    logits[3, vocab - 2] = -1e30
    want = logits.float().argmax(-1)
    want[1], want[2] = 2, 0
    got = sampling.argmax(logits)
    assert got.dtype == torch.int64 and torch.equal(got, want)


def test_gumbel_argmax() -> None:
    g = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(8, 3000, generator=g)).to(DEVICE)
    logits[:, ::7] = float("-inf")
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 0.7, 1.0, 1.0], device=DEVICE)
    k0 = torch.randint(0, 2**32, (8,), generator=g).to(DEVICE)
    k1 = torch.randint(-(2**31), 2**31, (8,), generator=g).to(DEVICE)
    k0[7], k1[7], logits[7] = k0[6], k1[6], logits[6]
    got = sampling.gumbel_argmax(logits, temperature, k0, k1)
    assert torch.equal(got, reference_sampling.gumbel_argmax(logits, temperature, k0, k1))
    assert got[6] == got[7]
    assert torch.equal(got[temperature == 0], logits[temperature == 0].argmax(-1))
    alone = sampling.gumbel_argmax(logits[3:4], temperature[3:4], k0[3:4], k1[3:4])
    assert alone == got[3]


def test_no_rows() -> None:
    nothing = torch.empty(0, 100, device=DEVICE)
    assert sampling.argmax(nothing).shape == (0,)
    assert logprobs.logsumexp(nothing).shape == (0, 1)
    assert logprobs.ranking_keys(nothing).shape == (0, 100)


@pytest.mark.parametrize("vocab", [9, 4096, 9001])
def test_logsumexp(vocab: int) -> None:
    logits = 5 * torch.randn(6, vocab + 3, generator=torch.Generator().manual_seed(vocab)).to(DEVICE)
    logits = logits[:, :vocab]
    logits[1] += 200.0
    logits[2, 1:] = float("-inf")
    logits[3] = float("-inf")
    logits[4, ::2] = float("-inf")
    got = logprobs.logsumexp(logits)
    torch.testing.assert_close(
        got.double(), logits.double().logsumexp(-1, keepdim=True), atol=2e-6, rtol=2e-7
    )
    assert torch.equal(logprobs.logsumexp(logits[4:5]), got[4:5])


def test_ranking_keys() -> None:
    """Distinct, in the order of the logits, of equals the lower index first; the same as the twin's."""
    x = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits = x.bfloat16().float()  # with many equals
    logits[0, :6] = torch.tensor([0.0, -0.0, float("-inf"), float("inf"), -0.0, 0.0])
    keys = logprobs.ranking_keys(logits)
    assert torch.equal(keys, reference_sampling.ranking_keys(logits))
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    assert torch.equal(keys.argsort(dim=-1, descending=True), order)
