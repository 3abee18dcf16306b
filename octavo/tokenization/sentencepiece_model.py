"""SentencePiece's own files (tokenizer.model): the few fields of the protobuf that tokenizing needs.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. Read here
rather than by the `sentencepiece` and `protobuf` packages, since these are fifteen numbered fields and
the file comes from outside: every length is checked against what is there before anything is made of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from octavo.errors import ModelError

MAX_FILE_BYTES = 256 << 20
MAX_PIECES = 1 << 20


class TokenType(IntEnum):
    """`SentencePiece.Type`, and `tokenizer.ggml.token_type` of GGUF, which took it over."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


UNIGRAM, BPE = 1, 2
_KINDS = {UNIGRAM: "unigram", BPE: "BPE", 3: "word", 4: "char"}


@dataclass
class SentencePieceModel:
    """What a SentencePiece file says.

    Attributes:
        tokens, scores, types: the pieces, in the order of their ids.
        kind: UNIGRAM or BPE.
        unk_id, bos_id, eos_id, pad_id: below 0 for none.
        byte_fallback: characters without a piece become `<0x..>` pieces.
        whitespace_as_suffix: ▁ stands after words rather than before them.
        charsmap: the compiled character normalization; empty for none.
        add_dummy_prefix: a space is put before a text.
        remove_extra_whitespaces: spaces at both ends go, runs become one.
        escape_whitespaces: spaces become ▁.
    """

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    kind: int = UNIGRAM
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    byte_fallback: bool = False
    whitespace_as_suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True

    def token(self, token_id: int) -> str | None:
        """The piece of an id; None for an id that is none."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None


class _Malformed(Exception):
    pass


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise _Malformed("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
        shift += 7


def _fields(data: memoryview) -> Iterator[tuple[int, int | float | memoryview]]:
    """(number, value) of a message's fields: an integer, a float or the bytes, after the wire type."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 2:
            size, at = _varint(data, at)
            if size > len(data) - at:
                raise _Malformed(f"a field says {size} bytes where {len(data) - at} are left")
            yield number, data[at : at + size]
            at += size
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            if size > len(data) - at:
                raise _Malformed("a number is cut off")
            yield number, struct.unpack_from("<d" if wire == 1 else "<f", data, at)[0]
            at += size
        else:
            raise _Malformed(f"a field has the unknown wire type {wire}")


def _signed(value: int | float | memoryview) -> int:
    """An int32 field; negative ones are written as 64 bits."""
    number = _integer(value)
    return number - (1 << 64) if number >= 1 << 63 else number


def _integer(value: int | float | memoryview) -> int:
    if not isinstance(value, int):
        raise _Malformed("a field is not of its type")
    return value


def _bytes(value: int | float | memoryview) -> memoryview:
    if not isinstance(value, memoryview):
        raise _Malformed("a field is not of its type")
    return value


def _read_piece(model: SentencePieceModel, data: memoryview) -> None:
    token, score, kind = "", 0.0, int(TokenType.NORMAL)
    for number, value in _fields(data):
        if number == 1:
            token = str(_bytes(value), "utf-8")
        elif number == 2:
            if not isinstance(value, float):
                raise _Malformed("a score is not a float")
            score = value
        elif number == 3:
            kind = _integer(value)
    if not score == score or abs(score) == float("inf"):
        raise _Malformed("a score is not finite")
    model.tokens.append(token)
    model.scores.append(score)
    model.types.append(kind)
    if len(model.tokens) > MAX_PIECES:
        raise _Malformed(f"more than {MAX_PIECES} pieces")


def _read_trainer(model: SentencePieceModel, data: memoryview) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.kind = _integer(value)
        elif number == 24:
            model.whitespace_as_suffix = bool(_integer(value))
        elif number == 35:
            model.byte_fallback = bool(_integer(value))
        elif number == 40:
            model.unk_id = _signed(value)
        elif number == 41:
            model.bos_id = _signed(value)
        elif number == 42:
            model.eos_id = _signed(value)
        elif number == 43:
            model.pad_id = _signed(value)


def _read_normalizer(model: SentencePieceModel, data: memoryview) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.charsmap = bytes(_bytes(value))
        elif number == 3:
            model.add_dummy_prefix = bool(_integer(value))
        elif number == 4:
            model.remove_extra_whitespaces = bool(_integer(value))
        elif number == 5:
            model.escape_whitespaces = bool(_integer(value))


_READERS = {1: _read_piece, 2: _read_trainer, 3: _read_normalizer}


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Read a SentencePiece file.

    Raises:
        ModelError: not one, truncated, corrupt, or of a kind that no language model uses.
    """
    model = SentencePieceModel()
    try:
        size = file.stat().st_size
        if not file.is_file() or size > MAX_FILE_BYTES:
            raise _Malformed(f"{size} bytes; at most {MAX_FILE_BYTES} are read")
        data = memoryview(file.read_bytes())
        for number, value in _fields(data):
            if number in _READERS:
                _READERS[number](model, _bytes(value))
        _check(model)
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}): fetch it again") from None
    except (_Malformed, UnicodeDecodeError) as error:
        words = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ModelError(
            f"{file} is no SentencePiece model or a corrupt one ({words}): fetch it again, or name another "
            "tokenizer with --tokenizer"
        ) from None
    return model


def _check(model: SentencePieceModel) -> None:
    if not model.tokens:
        raise _Malformed("it holds no pieces")
    if model.kind not in (UNIGRAM, BPE):
        raise _Malformed(f"its kind is {_KINDS.get(model.kind, model.kind)}, not unigram or BPE")
    if not 0 <= model.unk_id < len(model.tokens):
        raise _Malformed(f"its unknown token has the id {model.unk_id}")
    if model.types[model.unk_id] != TokenType.UNKNOWN:  # as sentencepiece itself: "unk is not defined"
        raise _Malformed(
            f"its token {model.unk_id}, {model.tokens[model.unk_id][:40]!r}, is not the unknown one"
        )
    if model.whitespace_as_suffix:
        raise _Malformed("it puts whitespace after words, which is not supported")
    seen = set(model.tokens)
    if len(seen) != len(model.tokens):
        raise _Malformed("a token occurs twice in its vocabulary")
