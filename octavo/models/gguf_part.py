"""One GGUF file as it lies on the disk: header, metadata and table of tensors, bounded before they are read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
The `gguf` package's own reader makes several objects per vocabulary entry, which costs seconds on a
vocabulary of 50 thousand tokens; here an array of strings is one list, one of numbers one NumPy array.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
# What no model comes near: Gemma 3, of the largest vocabularies, has 20 MB of metadata and 800 thousand
# strings.
_MAX_HEADER = 256 << 20
_MAX_STRINGS = 1 << 22
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_DIMS = 4  # ggml's own

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
# ggml's encodings (ggml.h, enum ggml_type): number, name, elements and bytes of a block (ggml-common.h).
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    `shape` is row-major, as PyTorch's (GGUF stores the fastest dimension first); `ggml_type` the
    number of its encoding and `type_name` that encoding's name ("Q4_K"); `offset` counts bytes from
    the start of the file `path`, and `nbytes` the encoded bytes.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    nbytes: int
    path: Path


class GGUFPart:
    """One file, mapped into memory and read as asked.

    Attributes:
        path: the file.
        size: of it in bytes.
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
        except (OSError, ValueError, OverflowError) as error:
            raise ModelError(f"{self.path}: cannot be read as GGUF ({error}): give a readable file") from None
        self.size = self._end = len(self._map)
        try:
            self._read_header()
        except (struct.error, IndexError):
            raise self._truncated() from None
        except UnicodeDecodeError:
            raise self._corrupt("a string in its metadata is not UTF-8") from None

    def _truncated(self) -> ModelError:
        if self._end < len(self._map):
            return self._corrupt(f"more than {_MAX_HEADER} bytes of metadata")
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
        self._end = min(len(self._map), _MAX_HEADER)
        self._strings_left = _MAX_STRINGS
        if count * 13 > self._end or self._num_tensors * 24 > self._end:  # the least that each takes
            raise self._truncated()
        if count > _MAX_KEYS or self._num_tensors > _MAX_TENSORS:
            raise self._corrupt(
                f"{count} metadata keys and {self._num_tensors} tensors, more than any model's"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in self.metadata:
                raise self._corrupt(f"two metadata keys are {key[:100]!r}")
            self.metadata[key] = self._value(self._number(4))
        self._tensors_at = self._pos

    def _number(self, kind: int) -> Any:
        scalar = _SCALARS[kind]
        (value,) = scalar.unpack_from(self._map, self._pos)
        self._pos += scalar.size
        if self._pos > self._end:
            raise self._truncated()
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        view, pos, end = self._map, self._pos, self._end
        if count * 8 > end - pos:
            raise self._truncated()
        self._strings_left -= count
        if self._strings_left < 0:
            raise self._corrupt(f"more than {_MAX_STRINGS} strings in its metadata")
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
                what = "arrays" if item == _ARRAY else f"values of the unknown type {item}"
                raise self._corrupt(f"an array holds {what}")
            dtype = np.dtype(_ARRAY_DTYPES[item])
            size = count * dtype.itemsize
            if size > self._end - self._pos:
                raise self._truncated()
            array = np.frombuffer(self._map[self._pos : self._pos + size], dtype=dtype)
            self._pos += size
            return array
        if kind not in _SCALARS:
            raise self._corrupt(f"a value has the unknown type {kind}")
        return self._number(kind)

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """Every tensor by name, in file order, each checked to lie within the file and clear of others."""
        self._pos = self._tensors_at
        raw = []
        try:
            for _ in range(self._num_tensors):
                name = self._string()
                num_dims = self._number(4)
                if num_dims > _MAX_DIMS:
                    raise self._corrupt(f"tensor {name[:100]!r} has {num_dims} dimensions")
                dims = [self._number(10) for _ in range(num_dims)]
                raw.append((name, dims, self._number(4), self._number(10)))
        except (struct.error, IndexError):
            raise self._truncated() from None
        except UnicodeDecodeError:
            raise self._corrupt("a tensor's name is not UTF-8") from None
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two from 8 to 2^20")
        base = -(-self._pos // alignment) * alignment
        out: dict[str, GGUFTensor] = {}
        for name, dims, kind, offset in raw:
            if kind not in GGML_TYPES:
                raise ModelError(
                    f"{self.path}: tensor {name!r} has the unknown GGML type {kind}: "
                    "quantize the model to another type"
                )
            type_name, block, block_bytes = GGML_TYPES[kind]
            if dims and dims[0] % block:
                raise self._corrupt(f"rows of {name!r} hold {dims[0]} elements, not a multiple of {block}")
            nbytes = math.prod(dims) // block * block_bytes
            if base + offset + nbytes > len(self._map):
                raise ModelError(
                    f"{self.path}: truncated: tensor {name!r} needs bytes up to {base + offset + nbytes} "
                    f"but the file has {len(self._map)}: fetch it again"
                )
            if offset % alignment:
                raise self._corrupt(f"tensor {name!r} is not aligned to {alignment} bytes")
            if name in out:
                raise self._corrupt(f"two tensors are named {name!r}")
            shape = tuple(reversed(dims))
            out[name] = GGUFTensor(name, shape, kind, type_name, base + offset, nbytes, self.path)
        at = base
        for tensor in sorted(out.values(), key=lambda t: (t.offset, t.nbytes)):
            if tensor.offset < at:
                raise self._corrupt(f"tensor {tensor.name!r} overlaps another")
            at = tensor.offset + tensor.nbytes
        return out

    def data(self, tensor: GGUFTensor) -> np.ndarray:
        """The encoded bytes of a tensor: a read-only uint8 view `[nbytes]` of the mapped file, not a copy."""
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
