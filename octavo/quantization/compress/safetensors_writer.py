"""Safetensors files that are written tensor by tensor, so that no more than one is in memory.

Format: see `octavo.models.safetensors_file`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from octavo.models.weights import TORCH_DTYPES

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_CHUNK = 1 << 22


class Entry(NamedTuple):
    """A tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """A context manager: the file appears under its name once all tensors are in it, or not at all.

    Args:
        path: the file.
        entries: every tensor that it will hold.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry]):
        self.path, self.entries = path, entries
        self._part = path.with_name(f".{path.name}.part")
        # The widest types first, so that each tensor begins where PyTorch wants it.
        names = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, int] = {}
        at = 0
        for name in names:
            entry = entries[name]
            header[name] = {
                "dtype": NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [at, at + entry.nbytes],
            }
            self._places[name] = at
            at += entry.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._start = 8 + len(raw)
        self._header = struct.pack("<Q", len(raw)) + raw
        self._size = self._start + at

    def __enter__(self) -> SafetensorsWriter:
        self._file = self._part.open("wb")
        self._file.write(self._header)
        self._file.truncate(self._size)
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one of the entries; each is written once."""
        entry = self.entries[name]
        assert (tensor.dtype, tuple(tensor.shape)) == tuple(entry), (name, tensor.dtype, tensor.shape, entry)
        self._file.seek(self._start + self._places.pop(name))
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for first in range(0, len(raw), _CHUNK):
            self._file.write(raw[first : first + _CHUNK].numpy().tobytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._file.close()
            self._part.unlink(missing_ok=True)
            return
        assert not self._places, f"never written: {sorted(self._places)[:3]}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
