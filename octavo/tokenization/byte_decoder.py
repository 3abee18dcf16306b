"""From a tokenizer's decoder to a function token -> bytes, so that text is the UTF-8 of joined bytes.

For byte-level BPE (GPT-2, Llama 3, Qwen) this is the definition of decoding. For SentencePiece
vocabularies with byte fallback it agrees with the `tokenizers` library on valid UTF-8; on invalid
byte runs that library turns every byte of the run into U+FFFD, valid characters included, which no
stream could do (they have been sent); here only the invalid bytes become U+FFFD. A continuation of a
WordPiece vocabulary that stands first loses its `##` here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ModelError

Step = Callable[[str], "str | bytes"]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[int, int]:
    """GPT-2's map from printable stand-ins to bytes, for `str.translate`.

    Characters below 256 that stand for no byte map to U+FFFF, so that a Latin-1 encoding of the
    result fails for every string that is not made of stand-ins alone.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {b: 0xFFFF for b in others}
    table.update({b: b for b in printable})
    table.update({256 + i: b for i, b in enumerate(others)})
    return table


BYTES = _byte_level_table()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_fallback(token: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token


def _word_piece(prefix: str, cleanup: bool) -> Step:
    """Words of WordPiece: a space before each that is no continuation, and none before punctuation."""
    # The library's own list; it looks at one token at a time too.
    closing = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m"}
    closing |= {" do not": " don't", " 's": "'s", " 've": "'ve", " 're": "'re"}

    def step(token: str) -> str:
        text = token.replace(prefix, "", 1) if token.startswith(prefix) else " " + token
        if cleanup:
            for old, new in closing.items():
                text = text.replace(old, new)
        return text

    return step


def _replace(old: str, new: str) -> Step:
    return lambda token: token.replace(old, new)


class ByteDecoder:
    """A decoder as the `tokenizers` library describes it in JSON, token by token.

    Attributes:
        lead: spaces that are taken from the start of a text (SentencePiece's dummy prefix).

    Raises:
        ModelError: a decoder whose text is not made of the tokens' bytes.
    """

    def __init__(self, description: Mapping[str, Any] | None):
        self.lead = 0
        self._steps: list[Step] = []
        for part in self._parts(description):
            self._add(part)

    def _parts(self, description: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
        if description is None:
            raise ModelError(
                "the tokenizer has no decoder: "
                "use one with a ByteLevel or SentencePiece decoder in tokenizer.json"
            )
        if description["type"] == "Sequence":
            return [inner for part in description["decoders"] for inner in self._parts(part)]
        return [description]

    def _add(self, part: Mapping[str, Any]) -> None:
        kind = part["type"]
        if kind == "ByteLevel":
            self._steps.append(_byte_level)
        elif kind == "ByteFallback":
            self._steps.append(_byte_fallback)
        elif kind == "Replace" and "String" in part["pattern"]:
            self._steps.append(_replace(part["pattern"]["String"], part["content"]))
        elif kind == "Metaspace":
            self._steps.append(_replace(part["replacement"], " "))
            self.lead = int(part.get("prepend_scheme", "always") != "never")
        elif kind == "WordPiece":
            self._steps.append(_word_piece(part["prefix"], part["cleanup"]))
            self.lead = 1
        elif kind == "Strip" and part["content"] == " " and part["stop"] == 0:
            self.lead = part["start"]
        elif kind != "Fuse":
            raise ModelError(
                f"the tokenizer's decoder {kind!r} is not supported: "
                "use one with a ByteLevel, SentencePiece or WordPiece decoder in tokenizer.json"
            )

    def __call__(self, token: str) -> bytes:
        """The bytes that a token adds to a text (anywhere but at its very start, see `lead`)."""
        value: str | bytes = token
        for step in self._steps:
            if isinstance(value, bytes):
                return value
            value = step(value)
        return value if isinstance(value, bytes) else value.encode()
