"""Values of settings: amounts with units, JSON, types, and how they are told."""

from __future__ import annotations

import json
import math
import types
import typing
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError


def parse_amount(text: str, unit: str) -> int | str:
    """`8k` → 8000 (`8K` → 8192) tokens, `4GiB` → bytes; `auto` stays. Raises ConfigError."""
    if text.strip().lower() == "auto":
        return "auto"
    number = text.strip()
    scale = 1.0
    suffixes = {"k": 1e3, "m": 1e6, "g": 1e9, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    if unit == "bytes":
        suffixes |= {p + "iB": float(2 ** (10 * (i + 1))) for i, p in enumerate("KMGT")}
        suffixes |= {p + "B": 1000.0 ** (i + 1) for i, p in enumerate("KMGT")}
    for suffix in sorted(suffixes, key=len, reverse=True):
        if number.endswith(suffix):
            number, scale = number[: -len(suffix)], suffixes[suffix]
            break
    try:
        value = float(number) * scale
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value != int(value):
        raise ConfigError(f"{text!r} is not an amount of {unit}: write for example 4096, 8k or 4GiB")
    return int(value)


def json_object(name: str, given: Any, files: bool = False) -> dict[str, Any] | None:
    """A dictionary, or its JSON; None if it is empty.

    Args:
        files: text that does not begin as an object is the path of a file of one.

    Raises:
        ConfigError: something else.
    """
    text = given
    if files and isinstance(given, str) and not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a NUL
            raise ConfigError(
                f"{name}={given[:100]!r} is neither a JSON object nor a readable file ({error})"
            ) from None
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}={given[:100]!r} is not JSON ({error})") from None
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{name}={str(given)[:100]!r} is not valid: give a JSON object")
    return value or None


def members_of(hint: Any) -> tuple[Any, ...]:
    """The types that a hint names: those of a union, without their arguments."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(m for part in typing.get_args(hint) for m in members_of(part))
    return (typing.get_origin(hint) or hint,)


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has a hint's type; an integer is a number too, a truth value is neither."""
    members = members_of(hint)
    if isinstance(value, bool):
        return bool in members
    if isinstance(value, int) and float in members:
        return True
    return isinstance(value, members)


def type_name(kind: Any) -> str:
    """A type as an error tells it."""
    names = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "True or False",
        dict: "a dictionary",
        list: "a list",
        type(None): "None",
    }
    return names.get(kind, str(kind))


def listing(values: tuple[Any, ...]) -> str:
    """Values in a sentence: `a, b or c`."""
    texts = [str(v) for v in values if v is not None or len(values) == 1]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]
