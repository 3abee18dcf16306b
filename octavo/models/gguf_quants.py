"""GGML's tensor encodings turned into numbers by PyTorch, on the device where the bytes lie.

Results are bit-equal to ggml's (see `octavo.quantization.gguf_blocks`). Encodings that are rare as whole
models (IQ*, TQ*, MXFP4, …) go through the `gguf` package.
"""

from __future__ import annotations

import torch

from octavo.quantization.gguf_blocks import ENCODINGS, decode

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
    if type_name in PLAIN:
        plain = PLAIN[type_name]
        aligned = data if data.storage_offset() % plain.itemsize == 0 else data.clone()
        return aligned.view(plain).view(shape).to(device=device, dtype=dtype)
    if type_name not in ENCODINGS:
        return _by_package(data, type_name, shape).to(device=device, dtype=dtype)
    encoding = ENCODINGS[type_name]
    elements = encoding.elements
    blocks = data.view(-1, encoding.nbytes).to(device)
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1, elements)
    step = (_CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS) // elements
    scratch = torch.empty((min(step, len(blocks)), elements), dtype=torch.float32, device=device)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        target = flat[start : start + step] if dtype == torch.float32 else scratch[: len(part)]
        decode(encoding, part, target)
        if dtype != torch.float32:
            flat[start : start + step].copy_(target)
    return out


def _by_package(data: torch.Tensor, type_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as decode

    rows = data.numpy().reshape(*shape[:-1], -1)
    return torch.from_numpy(decode(rows, GGMLQuantizationType[type_name])).view(shape)


#: encodings that are numbers as they are
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
