"""A lean reader of GGUF files: metadata in milliseconds, tensors as views of the mapped file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
The `gguf` package's own reader makes several objects per vocabulary entry, which costs seconds on a
vocabulary of 50 thousand tokens; here an array of strings is one list, one of numbers one NumPy array.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octavo.errors import ModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_ARRAY_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


Source = TypeVar("Source")
Result = TypeVar("Result")


def reads_metadata(read: Callable[[Source], Result]) -> Callable[[Source], Result]:
    """For functions of a file or its path: a metadata value of the wrong kind becomes a ModelError."""

    @functools.wraps(read)
    def checked(source: Source) -> Result:
        try:
            return read(source)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ModelError(
                f"{getattr(source, 'path', source)}: malformed GGUF metadata ({error}): convert it again"
            ) from None

    return checked


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in its file.

    `shape` is row-major, as PyTorch's (GGUF stores the fastest dimension first); `ggml_type` the
    number of its encoding and `type_name` that encoding's name ("Q4_K"); `offset` counts bytes from
    the start of the file and `nbytes` the encoded bytes.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    nbytes: int


class GGUFFile:
    """One GGUF file, mapped into memory and read as asked.

    Attributes:
        path: the file.
        version: 2 or 3.
        metadata: key to int, float, bool, str, list of str, or NumPy array of numbers.

    Raises:
        ModelError: not a GGUF file, of another version or byte order, truncated, or corrupt.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path}: cannot be read as GGUF ({error}): give a readable file") from None
        try:
            self._read_header()
        except (struct.error, IndexError):
            raise self._truncated() from None
        except UnicodeDecodeError:
            raise self._corrupt("a string in its metadata is not UTF-8") from None

    def _truncated(self) -> ModelError:
        return ModelError(
            f"{self.path}: truncated: the GGUF file has {len(self._map)} bytes and its header says more: "
            "fetch it again"
        )

    def _corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: corrupt GGUF file ({what}): fetch it again")

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise ModelError(
                f"{self.path}: not a GGUF file (it starts with {bytes(self._map[:4])!r}): give a .gguf file"
            )
        (self.version,) = struct.unpack_from("<I", self._map, 4)
        if self.version not in (2, 3):
            raise ModelError(
                f"{self.path}: GGUF version {self.version} is not supported: "
                "use a little-endian file of version 2 or 3"
            )
        self._num_tensors, count = struct.unpack_from("<QQ", self._map, 8)
        self._pos = 24
        self.metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            self.metadata[key] = self._value(self._number(4))
        self._tensors_at = self._pos

    def _number(self, kind: int) -> Any:
        scalar = _SCALARS[kind]
        (value,) = scalar.unpack_from(self._map, self._pos)
        self._pos += scalar.size
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        view, pos, end = self._map, self._pos, len(self._map)
        if count * 8 > end - pos:
            raise self._truncated()
        length_at = struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            start = pos + 8
            pos = start + length_at(view, pos)[0]
            if pos > end:
                raise self._truncated()
            out.append(view[start:pos].decode())
        self._pos = pos
        return out

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._number(4), self._number(10)
            if item == _STRING:
                return self._strings(count)
            if item not in _ARRAY_DTYPES:
                raise self._corrupt(f"an array holds values of the unknown type {item}")
            dtype = np.dtype(_ARRAY_DTYPES[item])
            size = count * dtype.itemsize
            if size > len(self._map) - self._pos:
                raise self._truncated()
            array = np.frombuffer(self._map[self._pos : self._pos + size], dtype=dtype)
            self._pos += size
            return array
        if kind not in _SCALARS:
            raise self._corrupt(f"a value has the unknown type {kind}")
        return self._number(kind)

    @property
    def architecture(self) -> str:
        """`general.architecture`: llama, qwen2, …"""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise self._corrupt("general.architecture is missing")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture's name."""
        return self.metadata.get(
            key.replace("{arch}", self.architecture) if "{arch}" in key else key, default
        )

    @cached_property
    @reads_metadata
    def tensors(self) -> dict[str, GGUFTensor]:
        """Every tensor by name, in file order, each checked to lie within the file."""
        # Here rather than at the top: the package costs a quarter of a second, and tokenizers need no tensor.
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        self._pos = self._tensors_at
        raw = []
        try:
            for _ in range(self._num_tensors):
                name = self._string()
                dims = [self._number(10) for _ in range(self._number(4))]
                raw.append((name, dims, self._number(4), self._number(10)))
        except (struct.error, IndexError):
            raise self._truncated() from None
        except UnicodeDecodeError:
            raise self._corrupt("a tensor's name is not UTF-8") from None
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        if alignment <= 0:
            raise self._corrupt(f"general.alignment is {alignment}")
        base = -(-self._pos // alignment) * alignment
        out: dict[str, GGUFTensor] = {}
        for name, dims, kind, offset in raw:
            try:
                type_name = GGMLQuantizationType(kind).name
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise ModelError(
                    f"{self.path}: tensor {name!r} has the unknown GGML type {kind}: update the gguf package"
                ) from None
            elements = 1
            for dim in dims:
                elements *= dim
            if dims and dims[0] % block:
                raise self._corrupt(f"rows of {name!r} hold {dims[0]} elements, not a multiple of {block}")
            nbytes = elements // block * block_bytes
            if base + offset + nbytes > len(self._map):
                raise ModelError(
                    f"{self.path}: truncated: tensor {name!r} needs bytes up to {base + offset + nbytes} "
                    f"but the file has {len(self._map)}: fetch it again"
                )
            if name in out:
                raise self._corrupt(f"two tensors are named {name!r}")
            out[name] = GGUFTensor(name, tuple(reversed(dims)), kind, type_name, base + offset, nbytes)
        return out

    def data(self, name: str) -> np.ndarray:
        """The encoded bytes of a tensor: a read-only uint8 view `[nbytes]` of the mapped file, not a copy."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
