"""Weights of a checkpoint folder: safetensors mapped into memory, or PyTorch's own files.

A yielded tensor is a view of the mapped file, so that a weight is in memory once, where its consumer
copies it; pages behind it are the system's to drop.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.errors import ModelError
from octavo.models.hf_config import read_json
from octavo.models.safetensors_file import StoredTensor, list_files, read_header
from octavo.models.targets import Targets, check_tensors

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BIN_INDEX = "pytorch_model.bin.index.json"


def map_file(path: Path, size: int) -> torch.Tensor:
    """The bytes of a file as uint8 `[size]`, mapped privately: read on touch, never written back."""
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def typed_view(data: torch.Tensor, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """`nbytes` of mapped bytes from `offset` on as elements of `dtype`; a copy only if misaligned."""
    piece = data[offset : offset + nbytes]
    if offset % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype)


def folder_weights(
    folder: Path, targets: Targets, architecture: str, allow_bin: bool
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Total bytes, and the weights one by one, of a checkpoint folder.

    Args:
        targets: what the model takes.
        architecture: of the model, for messages.
        allow_bin: take `pytorch_model*.bin` if there is no safetensors file.

    Raises:
        ModelError: no weights, a missing shard, a truncated or corrupt file, or weights other than
            the model's.
    """
    files = list_files(folder)
    if files:
        return _safetensors(folder, files, targets, architecture)
    if allow_bin and (bins := _bin_files(folder)):
        return sum(p.stat().st_size for p in bins), _bins(folder, bins, targets, architecture)
    raise ModelError(
        f"{folder}: no safetensors file: fetch the weights, or give --load-format dummy for random ones"
    )


def _safetensors(
    folder: Path, files: list[Path], targets: Targets, architecture: str
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    headers = [read_header(path) for path in files]
    stored: dict[str, tuple[int, ...]] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in stored:
                raise ModelError(
                    f"{header.path}: tensor {name!r} is also in another file: remove one of the two"
                )
            stored[name] = tensor.shape
    wanted = set(check_tensors(stored, targets, folder, architecture))

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for header in headers:
            data = map_file(header.path, header.size)
            for name, tensor in header.tensors.items():
                if name in wanted:
                    yield name, _view(data, tensor)

    total = sum(t.nbytes for h in headers for name, t in h.tensors.items() if name in wanted)
    return total, read()


def _view(data: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    return typed_view(data, tensor.offset, tensor.nbytes, TORCH_DTYPES[tensor.dtype]).view(tensor.shape)


def _bin_files(folder: Path) -> list[Path]:
    index = folder / BIN_INDEX
    if not index.exists():
        return sorted(folder.glob("pytorch_model*.bin"))
    names = sorted({str(name) for name in (read_json(index).get("weight_map") or {}).values()})
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder / name}: missing, though {BIN_INDEX} names it: fetch the model's other files"
            )
    return [folder / name for name in names]


def _bins(
    folder: Path, files: list[Path], targets: Targets, architecture: str
) -> Iterator[tuple[str, torch.Tensor]]:
    states = []
    for path in files:
        try:
            # weights_only: the file is a pickle, and may otherwise run code.
            states.append(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"{path}: cannot be loaded safely ({reason}): fetch it again, or use safetensors"
            ) from None
    tensors = {name: tensor for state in states for name, tensor in state.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in check_tensors(shapes, targets, folder, architecture):
        yield name, tensors[name]
