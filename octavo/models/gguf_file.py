"""A model's GGUF file, or the files that it is split into (`-00001-of-00003.gguf`), read as one.

The first part of a split model holds the metadata and the tokenizer, and each part tensors of its own;
`split.no`, `split.count` and `split.tensors.count` in each say what belongs together (llama.cpp's
gguf-split).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octavo.errors import ModelError
from octavo.models.gguf_part import GGUFPart, GGUFTensor
from octavo.models.shards import shard_name, shard_numbers

__all__ = ["GGUFFile", "GGUFTensor", "reads_metadata"]

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


class GGUFFile:
    """One model's GGUF files.

    Args:
        path: the file, or any part of a split model.

    Attributes:
        path: the file; of a split model its first part.
        parts: the files in order.
        version: 2 or 3.
        metadata: key to int, float, bool, str, list of str, or NumPy array of numbers.

    Raises:
        ModelError: not a GGUF file, of another version or byte order, truncated, or corrupt; a part
            that is missing or belongs to another model.
    """

    def __init__(self, path: str | Path):
        given = Path(path)
        part = GGUFPart(given)
        count = _split(part, "count", 1)
        self.parts = [part]
        if count > 1:
            self.parts = [part if p == given else GGUFPart(p) for p in _siblings(part, count)]
            _check_parts(self.parts, count)
        self.path = self.parts[0].path
        self.version = self.parts[0].version
        self.metadata = self.parts[0].metadata

    @property
    def architecture(self) -> str:
        """`general.architecture`: llama, qwen2, …"""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise ModelError(
                f"{self.path}: corrupt GGUF file (general.architecture is missing): fetch it again"
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture's name."""
        return self.metadata.get(
            key.replace("{arch}", self.architecture) if "{arch}" in key else key, default
        )

    @cached_property
    @reads_metadata
    def tensors(self) -> dict[str, GGUFTensor]:
        """Every tensor by name, in the order of the parts and of each part's table."""
        out: dict[str, GGUFTensor] = {}
        for part in self.parts:
            for name, tensor in part.tensors.items():
                if name in out:
                    raise ModelError(
                        f"{part.path}: tensor {name!r} is also in {out[name].path.name}: fetch the parts "
                        "again"
                    )
                out[name] = tensor
        if len(self.parts) > 1:
            wanted = _split(self.parts[0], "tensors.count", len(out))
            if len(out) != wanted:
                raise ModelError(
                    f"{self.path}: its {len(self.parts)} parts hold {len(out)} tensors of {wanted}: fetch "
                    "them again, from one place"
                )
        return out

    def data(self, name: str) -> np.ndarray:
        """The encoded bytes of a tensor: a read-only uint8 view `[nbytes]` of the mapped file, not a copy."""
        tensor = self.tensors[name]
        return next(part for part in self.parts if part.path == tensor.path).data(tensor)


def _split(part: GGUFPart, key: str, default: int) -> int:
    value = part.metadata.get(f"split.{key}", default)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ModelError(f"{part.path}: corrupt GGUF file (split.{key} is {value!r}): fetch it again")
    return value


def _siblings(part: GGUFPart, count: int) -> list[Path]:
    """The paths of all parts, by the name of one."""
    numbers = shard_numbers(part.path.name)
    if numbers is None or numbers[2] != count or count > 99999:
        raise ModelError(
            f"{part.path}: is part {_split(part, 'no', 0) + 1} of {count} of a model, which its name doesn't "
            f"say: name the parts …-00001-of-{count:05d}.gguf and so on"
        )
    paths = []
    for no in range(1, count + 1):
        path = part.path.with_name(shard_name(part.path.name, no))
        if not path.is_file():
            raise ModelError(
                f"{path}: missing, one of {count} parts of the model: fetch them all into one folder"
            )
        paths.append(path)
    return paths


def _check_parts(parts: list[GGUFPart], count: int) -> None:
    total = _split(parts[0], "tensors.count", 0)
    for index, part in enumerate(parts):
        mine = (_split(part, "no", 0), _split(part, "count", 1), _split(part, "tensors.count", 0))
        if mine != (index, count, total):
            raise ModelError(
                f"{part.path}: is part {mine[0] + 1} of {mine[1]} of a model of {mine[2]} tensors, not part "
                f"{index + 1} of {count} of one of {total}: fetch the parts again, from one place"
            )
