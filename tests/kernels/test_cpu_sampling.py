"""Arg max and Gumbel arg max on the CPU: exact semantics, and agreement with the plain twin."""

import numpy as np
import pytest
import torch

from octavo.kernels import reference_sampling
from octavo.kernels.cpu import ops

pytestmark = pytest.mark.skipif(not ops.available(), reason=ops.why_not())

DTYPES = [torch.float32, torch.bfloat16]
NAN = float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 49152), (7, 30001), (3, 5), (2, 1), (64, 513)])
def test_argmax_like_numpy(dtype, rows, vocab):
    logits = torch.randn(rows, vocab + 8).to(dtype)[:, :vocab]
    assert ops.argmax(logits).tolist() == logits.float().numpy().argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [4, 700, 20000])
def test_argmax_takes_the_lowest_of_equals_and_the_first_nan(vocab):
    logits = torch.zeros(6, vocab)
    logits[1, [vocab - 1, vocab // 2]] = 1.0
    logits[2, [vocab // 2, vocab - 1]] = NAN
    logits[2, 0] = 5.0
    logits[3] = -float("inf")
    logits[4] = -float("inf")
    logits[4, vocab - 1] = -3e38
    logits[5, [vocab - 2, vocab - 1]] = float("inf")
    expected = [0, vocab // 2, vocab // 2, 0, vocab - 1, vocab - 2]
    assert logits.numpy().argmax(-1).tolist() == expected
    assert ops.argmax(logits).tolist() == expected


def twin_scores(logits, temperature, k0, k1):
    """Logits with noise in float64, from the definition in exact 64-bit integers."""
    mask = np.uint64(0xFFFFFFFF)
    x = (
        np.arange(logits.shape[1], dtype=np.uint64)[None] * np.uint64(0x9E3779B1)
        + k0.numpy().astype(np.uint64)[:, None]
    )
    x &= mask
    x ^= x >> np.uint64(16)
    x = (x * np.uint64(0x21F0AAAD)) & mask
    x ^= x >> np.uint64(15)
    x ^= k1.numpy().astype(np.uint64)[:, None] & mask
    x = (x * np.uint64(0x735A2D97)) & mask
    x ^= x >> np.uint64(15)
    u = ((x >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    return logits.double().numpy() / temperature.double().numpy()[:, None] - np.log(-np.log(u))


@pytest.mark.parametrize("key_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gumbel_takes_the_greatest_of_the_defined_noise(dtype, key_dtype):
    rows, vocab = 40, 10007
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator).to(dtype)
    temperature = torch.rand(rows, generator=generator) + 0.3
    k0, k1 = torch.randint(-(2**31), 2**31, (2, rows), generator=generator).to(key_dtype)
    ids = ops.gumbel_argmax(logits, temperature, k0, k1)
    scores = twin_scores(logits, temperature, k0.long() & 0xFFFFFFFF, k1.long() & 0xFFFFFFFF)
    gap = scores.max(-1) - scores[np.arange(rows), ids.numpy()]
    assert gap.max() < 1e-5, "only rounding may choose between near ties"
    assert (scores.argmax(-1) == ids.numpy()).mean() > 0.95


@pytest.mark.parametrize("dtype", DTYPES)
def test_gumbel_agrees_with_the_twin_and_not_with_the_batch(dtype):
    rows, vocab = 24, 49152
    logits = torch.randn(rows, vocab).to(dtype)
    temperature = torch.full((rows,), 0.8)
    temperature[3] = 0.0
    k0, k1 = torch.randint(0, 2**31, (2, rows))
    ids = ops.gumbel_argmax(logits, temperature, k0, k1)
    assert ids[3] == logits[3].float().numpy().argmax()
    assert (reference_sampling.gumbel_argmax(logits, temperature, k0, k1) == ids).float().mean() > 0.9
    alone = [
        ops.gumbel_argmax(logits[i : i + 1], temperature[i : i + 1], k0[i : i + 1], k1[i : i + 1])
        for i in range(rows)
    ]
    assert torch.equal(torch.cat(alone), ids)


def test_gumbel_draws_from_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, float("-inf")])
    draws = 40000
    temperature = torch.full((draws,), 1.3)
    k0, k1 = torch.randint(0, 2**31, (2, draws), generator=torch.Generator().manual_seed(0))
    ids = ops.gumbel_argmax(logits.expand(draws, 5).contiguous(), temperature, k0, k1)
    shares = torch.bincount(ids, minlength=5) / draws
    expected = torch.softmax(logits / 1.3, -1)
    assert shares[4] == 0
    assert (shares - expected).abs().max() < 0.012  # 5 standard deviations
