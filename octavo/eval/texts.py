"""Texts to evaluate on: a plain file is one text, a file of JSON lines holds one a line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError

JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class TextFile:
    """What a file holds: its texts, none empty, and the SHA-256 of its bytes (hexadecimal)."""

    path: str
    sha256: str
    texts: list[str]


def read_texts(path: str) -> TextFile:
    """Read UTF-8 text, or JSON objects with `text` (`.jsonl`, `.ndjson`); empty texts are dropped.

    Raises:
        ConfigError: it cannot be read, is not of its form, or holds no text.
    """
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"text={path!r} cannot be read: {error.strerror}") from None
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"text={path!r} is not UTF-8 (byte {error.start}): convert it") from None
    if Path(path).suffix.lower() in JSON_LINES:
        # Not splitlines(): JSON strings may hold U+2028 and others that it takes for line ends.
        lines = enumerate(content.split("\n"), 1)
        texts = [_text_of(path, number, line) for number, line in lines if line.strip()]
    else:
        texts = [content]
    texts = [text for text in texts if text]
    if not texts:
        raise ConfigError(f"text={path!r} is empty: give a file that holds text")
    return TextFile(path, hashlib.sha256(data).hexdigest(), texts)


def _text_of(path: str, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ConfigError(
            f'text={path!r}, line {number}: not a JSON object with a string "text": correct it, or name '
            f"plain text without the ending {' or '.join(JSON_LINES)}"
        )
    return text
