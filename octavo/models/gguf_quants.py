"""GGML's tensor encodings turned into numbers by PyTorch, on the device where the bytes lie.

The layouts are those of ggml's block structs (https://github.com/ggml-org/ggml, ggml-common.h). Each
function takes blocks `uint8 [n, bytes per block]`, writes `float32 [n, elements per block]`, and does
the operations of ggml's `dequantize_row_*` in the same order and precision: results are bit-equal.
Encodings that are rare as whole models (IQ*, TQ*, MXFP4, …) go through the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Elements per step: what keeps the working set in a core's cache, and what fills a GPU.
_CPU_ELEMENTS = 1 << 18
_GPU_ELEMENTS = 1 << 26


def dequantize(
    data: torch.Tensor, type_name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Decode a whole tensor.

    Args:
        data: uint8 `[bytes]`, the encoded tensor; on the CPU.
        type_name: GGML's name of the encoding ("Q4_K").
        shape: of the decoded tensor, row-major.
        dtype, device: of the result; bytes are moved first, then decoded there.

    Returns:
        `shape`; a view of `data` where that is what is asked for.

    Raises:
        NotImplementedError: an encoding that neither this module nor the `gguf` package decodes.
    """
    if type_name in _PLAIN:
        plain = _PLAIN[type_name]
        aligned = data if data.storage_offset() % plain.itemsize == 0 else data.clone()
        return aligned.view(plain).view(shape).to(device=device, dtype=dtype)
    if type_name not in _BLOCKS:
        return _by_package(data, type_name, shape).to(device=device, dtype=dtype)
    elements, size, decode = _BLOCKS[type_name]
    blocks = data.view(-1, size).to(device)
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1, elements)
    step = (_CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS) // elements
    scratch = torch.empty((min(step, len(blocks)), elements), dtype=torch.float32, device=device)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        target = flat[start : start + step] if dtype == torch.float32 else scratch[: len(part)]
        decode(part, target)
        if dtype != torch.float32:
            flat[start : start + step].copy_(target)
    return out


def _by_package(data: torch.Tensor, type_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as decode

    rows = data.numpy().reshape(*shape[:-1], -1)
    return torch.from_numpy(decode(rows, GGMLQuantizationType[type_name])).view(shape)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block, as float32 `[n, 1]`."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Bytes `[..., m]` to `out` `[..., 2, m]`: low halves, then high halves."""
    out[..., 0, :] = packed & 0xF
    out[..., 1, :] = packed >> 4


def _q4_0(b: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(b[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(_half(b, 0))


def _q4_1(b: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(b[:, 4:], out.view(-1, 2, 16))
    out.mul_(_half(b, 0)).add_(_half(b, 2))


def _fifth_bits(b: torch.Tensor, at: int) -> torch.Tensor:
    """Bit j of the 32 bits at byte `at`, worth 16 each: uint8 `[n, 32]`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device)
    return ((b[:, at : at + 4, None] >> shifts) & 1).mul_(16).flatten(1)


def _q5_0(b: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(b[:, 6:], out.view(-1, 2, 16))
    out.add_(_fifth_bits(b, 2)).sub_(16).mul_(_half(b, 0))


def _q5_1(b: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(b[:, 8:], out.view(-1, 2, 16))
    out.add_(_fifth_bits(b, 4)).mul_(_half(b, 0)).add_(_half(b, 2))


def _q8_0(b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(b[:, 2:].view(torch.int8)).mul_(_half(b, 0))


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bytes `[n, 64]` to `[n, 2, 4, 32]`: of each 32 bytes the lowest pairs of bits, then the next."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(1, 1, 4, 1)
    return (packed.unflatten(1, (2, 1, 32)) >> shifts) & 3


def _q2_k(b: torch.Tensor, out: torch.Tensor) -> None:
    scales = b[:, :16]
    out.view(-1, 2, 4, 32).copy_(_two_bits(b[:, 16:80]))
    scale = _half(b, 80) * (scales & 0xF)
    low = _half(b, 82) * (scales >> 4)
    out.view(-1, 16, 16).mul_(scale[:, :, None]).sub_(low[:, :, None])


def _q3_k(b: torch.Tensor, out: torch.Tensor) -> None:
    bits = torch.arange(8, dtype=torch.uint8, device=b.device).view(1, 2, 4, 1)
    # The third bit is stored inverted: where it is 0, 4 is taken off.
    high = ((b[:, None, None, :32] >> bits) & 1).mul_(4)
    out.view(-1, 2, 4, 32).copy_(_two_bits(b[:, 32:96])).add_(high).sub_(4)
    low = torch.empty((len(b), 2, 8), dtype=torch.uint8, device=b.device)
    _nibbles(b[:, 96:104], low)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device).view(1, 4, 1)
    top = ((b[:, 104:108].unflatten(1, (1, 4)) >> shifts) & 3).flatten(1)
    scale = _half(b, 108) * (low.flatten(1) + (top << 4)).to(torch.int8).sub_(32)
    out.view(-1, 16, 16).mul_(scale[:, :, None])


def _k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of Q4_K's and Q5_K's 8 sub-blocks, float32 `[n, 8, 1]` each.

    Six bits each in 12 bytes: four whole scales, four whole minima (their top two bits belong to the
    later ones), then the low nibbles of the later four of both.
    """
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat([first & 63, (third & 0xF) | ((first >> 2) & 0x30)], dim=1)
    low = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 0x30)], dim=1)
    return (_half(b, 0) * scale)[:, :, None], (_half(b, 2) * low)[:, :, None]


def _q4_k(b: torch.Tensor, out: torch.Tensor) -> None:
    scale, low = _k_scales(b)
    _nibbles(b[:, 16:].unflatten(1, (4, 32)), out.view(-1, 4, 2, 32))
    out.view(-1, 8, 32).mul_(scale).sub_(low)


def _q5_k(b: torch.Tensor, out: torch.Tensor) -> None:
    scale, low = _k_scales(b)
    bits = torch.arange(8, dtype=torch.uint8, device=b.device).view(1, 8, 1)
    high = ((b[:, None, 16:48] >> bits) & 1).mul_(16)
    _nibbles(b[:, 48:].unflatten(1, (4, 32)), out.view(-1, 4, 2, 32))
    out.view(-1, 8, 32).add_(high).mul_(scale).sub_(low)


def _q6_k(b: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(b[:, :128].unflatten(1, (2, 64)), out.view(-1, 2, 2, 64))
    high = _two_bits(b[:, 128:192]).mul_(16)
    out.view(-1, 2, 4, 32).add_(high).sub_(32)
    scale = _half(b, 208) * b[:, 192:208].view(torch.int8)
    out.view(-1, 16, 16).mul_(scale[:, :, None])


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_BLOCKS: dict[str, tuple[int, int, Callable[[torch.Tensor, torch.Tensor], None]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}
