"""JSON objects from files that anybody may have made: bounded in size, depth and number of values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from octavo.errors import ModelError

_T = TypeVar("_T")
# The largest index of a known model (140 thousand tensors) has 17 MB.
MAX_FILE_BYTES = 64 << 20
# A value costs 100 bytes or so in memory, whatever it takes in the file ("[],").
MAX_VALUES = 4_000_000


def parse_value(raw: bytes, unique: bool = False) -> Any:
    """Any JSON value.

    Args:
        unique: refuse a name that an object has twice, of which otherwise the last counts.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, or of too many values; the message says which.
    """
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > MAX_VALUES:
        raise ValueError(f"{values} values, more than {MAX_VALUES}")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_no_name_twice if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(raw: bytes, unique: bool = False) -> dict[str, Any]:
    """A JSON object, as `parse_value`.

    Raises:
        ValueError: as there, or not an object.
    """
    value = parse_value(raw, unique)
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__}, not a JSON object")
    return value


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:100]!r} is given twice")
            seen.add(name)
    return out


def read_json(path: Path, limit: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most `limit` bytes.

    Raises:
        ModelError: unreadable, too large, or not a JSON object.
    """
    return _read(path, parse_object, limit)


def read_value(path: Path) -> Any:
    """Any JSON value from a file.

    Raises:
        ModelError: unreadable, too large, or not JSON.
    """
    return _read(path, parse_value, MAX_FILE_BYTES)


def _read(path: Path, parse: Callable[[bytes], _T], limit: int) -> _T:
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelError(
                f"{path}: {size} bytes of JSON, more than any model's {limit}: fetch the file again"
            )
        raw = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path}: cannot be read ({reason}): give a complete model folder") from None
    try:
        return parse(raw)
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error}): fetch the file again") from None
