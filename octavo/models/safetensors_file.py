"""Headers of safetensors files, checked before anything is read through them.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian length, a JSON object of that
length, the tensors' bytes).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelError
from octavo.models.hf_config import read_json

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_MAX_HEADER = 100_000_000  # the format's own limit
INDEX = "model.safetensors.index.json"
# Mistral's own layout beside Hugging Face's, and LoRA adapters: not weights in our names.
_OTHER_FILES = ("consolidated", "adapter_model")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `dtype` a key of `DTYPE_BYTES`, `offset` in bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """One file's table of tensors by name, in the order of their bytes; `raw` is the header as stored."""

    path: Path
    size: int
    raw: bytes
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check a file's header: every tensor has a known type and lies within the file.

    Raises:
        ModelError: missing, truncated, corrupt, or with a tensor of another type.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            raw = file.read(length) if 2 <= length <= min(_MAX_HEADER, size - 8) else b""
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}): fetch the file again") from None
    if not raw:
        raise ModelError(f"{path}: truncated or not a safetensors file ({size} bytes): fetch the file again")
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = [_entry(name, entry, 8 + length) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ModelError(f"{path}: corrupt safetensors header: fetch the file again") from None
    for tensor in tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} has type {tensor.dtype}, which is not supported: "
                f"use a checkpoint in {', '.join(DTYPE_BYTES)}"
            )
        if tensor.nbytes != math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]:
            raise ModelError(
                f"{path}: corrupt header: size of {tensor.name!r} is wrong: fetch the file again"
            )
        if tensor.offset + tensor.nbytes > size:
            raise ModelError(
                f"{path}: truncated: tensor {tensor.name!r} ends at byte {tensor.offset + tensor.nbytes} "
                f"of a file of {size}: fetch the file again"
            )
    tensors.sort(key=lambda t: t.offset)
    return SafetensorsHeader(path, size, raw, {t.name: t for t in tensors})


def _entry(name: str, entry: dict, base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not 0 <= begin <= end or any(not isinstance(n, int) or n < 0 for n in shape):
        raise ValueError(name)
    return StoredTensor(name, entry["dtype"], shape, base + begin, end - begin)


def list_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by its index if there is one; may be empty.

    Raises:
        ModelError: the index is malformed, or names a file that is not there.
    """
    index = folder / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: has no weight_map: fetch the file again")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder / missing[0]}: missing, though {INDEX} names it"
                + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
                + ": fetch the model's other files"
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(_OTHER_FILES))
