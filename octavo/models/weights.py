"""Weights of a checkpoint folder: safetensors streamed from their files, or PyTorch's own format.

A yielded tensor is a view of the mapped file, so that a weight is in memory once, where its consumer
copies it; pages are read ahead of the consumer and let go behind it (`read_ahead`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.errors import ModelError
from octavo.models.bin_file import list_bins, load_bin
from octavo.models.mapped_file import MappedFile
from octavo.models.read_ahead import LEAST_RUN, Span, read_spans
from octavo.models.safetensors_file import SafetensorsHeader, list_files, read_header
from octavo.models.targets import Targets, check_tensors
from octavo.quantization.shard import byte_ranges

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


def folder_weights(
    folder: Path, targets: Targets, architecture: str, load_format: str, device: torch.device
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Total bytes, and the weights one by one in the order of their files, of a checkpoint folder.

    Args:
        targets: what the model takes.
        architecture: of the model, for messages.
        load_format: "safetensors", "pt" (`pytorch_model*.bin`), or "auto": the latter only where there
            are none of the former.
        device: where the consumer copies them; the tensors lie on the CPU.

    Raises:
        ModelError: no weights, a missing shard, a truncated or corrupt file, or weights other than
            the model's.
    """
    if load_format != "pt" and (files := list_files(folder)):
        return _safetensors(folder, files, targets, architecture, device)
    if load_format != "safetensors" and (bins := list_bins(folder)):
        return _bins(folder, bins, targets, architecture)
    what = "pytorch_model*.bin" if load_format == "pt" else "safetensors"
    raise ModelError(
        f"{folder}: no {what} file: fetch the weights, or give --load-format dummy for random ones"
    )


def stored_names(folder: Path, load_format: str) -> set[str]:
    """Names of the tensors that `folder_weights` would find; none without weights.

    Raises:
        ModelError: a file that is truncated or corrupt.
    """
    if load_format != "pt" and (files := list_files(folder)):
        return {name for path in files for name in read_header(path).tensors}
    bins = list_bins(folder) if load_format != "safetensors" else []
    return {name for path in bins for name in load_bin(path)}


def _safetensors(
    folder: Path, files: list[Path], targets: Targets, architecture: str, device: torch.device
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
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in wanted:
                check_dtype(str(header.path), name, tensor.dtype, TORCH_DTYPES.get(tensor.dtype), targets)
    total = sum(t.nbytes for h in headers for name, t in h.tensors.items() if name in wanted)
    return total, _read(headers, wanted, targets, device)


def check_dtype(where: str, name: str, stored: str, dtype: torch.dtype | None, targets: Targets) -> None:
    """Refuse a tensor in a type that its target does not take.

    Raises:
        ModelError: names the types that it takes.
    """
    wanted = targets[name].dtypes
    if dtype not in wanted:
        kinds = ", ".join(key for key, kind in TORCH_DTYPES.items() if kind in wanted)
        raise ModelError(
            f"{where}: tensor {name!r} has type {stored}, which is not supported: use a checkpoint in {kinds}"
        )


def _read(
    headers: list[SafetensorsHeader], wanted: set[str], targets: Targets, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = []
    spans = []
    for header in headers:
        file = MappedFile(header.path, header.size)
        for name, tensor in header.tensors.items():
            if name in wanted:
                tensors.append(tensor)
                regions = targets[name].regions
                parts = None
                if regions is not None:
                    itemsize = TORCH_DTYPES[tensor.dtype].itemsize
                    parts = byte_ranges(regions, math.prod(tensor.shape), itemsize, LEAST_RUN)
                whole = parts == [(0, tensor.nbytes)]
                spans.append(Span(file, tensor.offset, tensor.nbytes, None if whole else parts))
    for tensor, raw in zip(tensors, read_spans(spans, device), strict=True):
        dtype = TORCH_DTYPES[tensor.dtype]
        # The format doesn't promise that a tensor's bytes begin where PyTorch wants them.
        unaligned = tensor.offset % dtype.itemsize and targets[tensor.name].regions != ()
        aligned = raw.clone() if unaligned else raw
        yield tensor.name, aligned.view(dtype).view(tensor.shape)


def _bins(
    folder: Path, files: list[Path], targets: Targets, architecture: str
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        for name, tensor in load_bin(path).items():
            if name in tensors:
                raise ModelError(f"{path}: tensor {name!r} is also in another file: remove one of the two")
            tensors[name] = tensor
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = check_tensors(shapes, targets, folder, architecture)
    for name in wanted:
        check_dtype(str(folder), name, str(tensors[name].dtype), tensors[name].dtype, targets)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name in wanted:
            yield name, tensors[name]

    return sum(tensors[name].nbytes for name in wanted), read()
