"""Headers of safetensors files, checked before anything is read through them.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian length, a JSON object of that
length, the tensors' bytes).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.json_file import parse_object, read_json
from octavo.models.shards import NOT_WEIGHTS, check_shards

# Bits per element of every type of the format; those that models are read in are `weights.TORCH_DTYPES`.
DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32}
DTYPE_BITS |= {"F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8}
DTYPE_BITS |= {"F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_DIMS, _MAX_DIM = 8, 1 << 48
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `dtype` a key of `DTYPE_BITS`, `offset` in bytes from the file's start."""

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
    """Read and check a file's header: as the format demands, the tensors' bytes follow each other
    without overlap or gap, and all of them are there.

    Raises:
        ModelError: missing, truncated or corrupt.
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
        entries = parse_object(raw, unique=True)
        entries.pop("__metadata__", None)
        tensors = [_entry(name, entry, 8 + length) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{path}: corrupt safetensors header ({str(error)[:200] or type(error).__name__}): "
            "fetch the file again"
        ) from None
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    at = 8 + length
    for tensor in tensors:
        if tensor.offset != at:
            what = "overlaps another" if tensor.offset < at else "leaves a gap before it"
            raise ModelError(
                f"{path}: corrupt safetensors header: tensor {tensor.name!r} {what}: fetch the file again"
            )
        at += tensor.nbytes
        if at > size:
            raise ModelError(
                f"{path}: truncated: tensor {tensor.name!r} ends at byte {at} of a file of {size}: fetch the "
                "file again"
            )
    return SafetensorsHeader(path, size, raw, {t.name: t for t in tensors})


def _entry(name: str, entry: dict[str, Any], base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"tensor {name[:100]!r} has the unknown type {dtype!r}")
    if len(shape) > _MAX_DIMS or not all(type(n) is int and 0 <= n < _MAX_DIM for n in shape):
        raise ValueError(f"tensor {name[:100]!r} has no possible shape")
    if not (type(begin) is int and type(end) is int and 0 <= begin <= end):
        raise ValueError(f"tensor {name[:100]!r} has no possible place")
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise ValueError(f"the size of tensor {name[:100]!r} is wrong")
    return StoredTensor(name, dtype, shape, base + begin, end - begin)


def indexed_names(index: Path) -> list[str]:
    """The files that an index names, sorted.

    Raises:
        ModelError: no index, or one that names what cannot be a file of its own folder.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map: fetch the file again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ModelError(
                f"{index}: names {name[:200]!r}, which is no file of this folder: fetch it again from where "
                "you trust"
            )
    return names


def list_indexed(index: Path) -> list[Path]:
    """The files that an index names, all of which are there.

    Raises:
        ModelError: as `indexed_names`, or a file is missing.
    """
    names = indexed_names(index)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"{index.parent / missing[0]}: missing, though {index.name} names it"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
            + ": fetch the model's other files"
        )
    return [index.parent / name for name in names]


def list_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by its index if there is one; may be empty.

    Raises:
        ModelError: the index is malformed, or names a file that is not there.
    """
    index = folder / INDEX
    if index.exists():
        return list_indexed(index)
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(NOT_WEIGHTS))
    check_shards(files)
    return files
