"""GGML's encodings taken apart, against the numbers that the `gguf` package decodes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.kernels.reference_quant import QuantizedMatrix, dequantize
from octavo.quantization.gguf_blocks import ENCODINGS, is_finite, quantized_matrix
from octavo.quantization.quantized_tensor import QuantizedTensor, joined
from tests.kernels.quant_cases import FORMATS, matrix


def random_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """Random bytes with sane scales, uint8 `[rows, bytes]`."""
    encoding = ENCODINGS[name]
    random = np.random.default_rng(len(name))
    raw = random.integers(0, 256, (rows * columns // encoding.elements, encoding.nbytes), dtype=np.uint8)
    for at in encoding.halves:
        halves = random.standard_normal(len(raw)).astype(np.float16)
        raw[:, at : at + 2] = halves[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_quantized_matrix_is_the_decoded_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.quantization.gguf_blocks._STEP", 1024)  # several pieces
    raw = random_blocks(name, 7, 512)
    want = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).copy())
    kept = quantized_matrix(name, torch.from_numpy(raw.reshape(-1)), 7, 512)
    assert kept is not None and kept.format == ENCODINGS[name].format
    got = dequantize(kept)
    if name.endswith("_K"):  # scales are products: rounded to float16, as are minima
        group = kept.format.group
        size = want.unflatten(1, (-1, group)).abs().amax(2, keepdim=True)
        if kept.minimum is not None:
            size = size + 2 * kept.minimum.float().abs()[:, :, None]
        error = (got - want).unflatten(1, (-1, group)).abs()
        assert bool((error <= 2.0**-10 * size).all())
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_float_of_a_block_is_looked_at(name: str) -> None:
    encoding = ENCODINGS[name]
    raw = torch.from_numpy(random_blocks(name, 3, 256).reshape(-1))
    assert is_finite(encoding, raw)
    values = gguf.quants.dequantize(raw.numpy().reshape(3, -1), gguf.GGMLQuantizationType[name])
    assert np.isfinite(values).all()
    for at in encoding.halves:
        for value in (float("nan"), float("-inf")):
            broken = raw.view(-1, encoding.nbytes).clone()
            broken[-1, at : at + 2] = torch.tensor([value]).half().view(torch.uint8)
            assert not is_finite(encoding, broken.view(-1))


def test_scales_beyond_float16_are_not_kept() -> None:
    raw = random_blocks("Q6_K", 1, 256)
    raw[:, 208:210] = np.array([60000], np.float16).view(np.uint8)
    raw[:, 192:208] = 100
    assert quantized_matrix("Q6_K", torch.from_numpy(raw.reshape(-1)), 1, 256) is None


@pytest.mark.parametrize("name", ["q4-minimum", "q6-group16"])
def test_a_quantized_tensor_acts_as_its_numbers(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    kept = matrix(FORMATS[name], 12, 128, random)
    numbers, tensor = dequantize(kept), QuantizedTensor.of(kept)
    assert tensor.shape == (12, 128) and tensor.numel() == 12 * 128 and tensor.dtype is torch.float32
    order = torch.tensor([3, 1, 11])
    for index in (slice(2, 9), order, (slice(4, 12), slice(32, 96)), (order, slice(0, 128)), slice(5, 5)):
        piece = tensor[index]
        assert isinstance(piece, QuantizedTensor)
        assert torch.equal(dequantize(piece.matrix), numbers[index])
    for index in (3, (slice(None), slice(8, 40)), (slice(None), 5), (slice(0, 3), slice(0, 64, 2))):
        piece = tensor[index]
        assert type(piece) is torch.Tensor and torch.equal(piece, numbers[index])
    target = torch.empty(12, 128, dtype=torch.bfloat16)
    assert torch.equal(target.copy_(tensor), numbers.bfloat16())
    assert torch.equal(tensor + 1, numbers + 1) and torch.equal(torch.cat([tensor, tensor])[12:], numbers)
    assert type(tensor.T) is torch.Tensor and torch.equal(tensor.T, numbers.T)


def test_neighbours_of_one_format_are_joined() -> None:
    random = torch.Generator().manual_seed(1)
    a, b, c, d = (matrix(FORMATS[k], 8, 64, random) for k in ("q4-minimum", "q4-minimum", "q8", "q4-minimum"))
    got: list[QuantizedMatrix] = joined([a, b, c, d])
    assert [part.q.shape[0] for part in got] == [16, 8, 8]
    assert torch.equal(dequantize(got[0]), torch.cat([dequantize(a), dequantize(b)]))
    assert got[1] is c and got[2] is d
