"""Follows one JSON object that comes in pieces: where it ends, where its members lie, whether it is JSON."""

from __future__ import annotations

import json
import re
from enum import Enum

SPACES = " \t\r\n"

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARS = frozenset("+-.0123456789aeflnrstuE")
_HEX = frozenset("0123456789abcdefABCDEF")


class Status(Enum):
    """How far a reader is."""

    OPEN = 0
    DONE = 1
    BROKEN = 2


class _Want(Enum):
    OBJECT = 0
    VALUE = 1
    VALUE_OR_END = 2
    KEY = 3
    KEY_OR_END = 4
    COLON = 5
    COMMA_OR_END = 6
    STRING = 7
    ESCAPE = 8
    HEX = 9
    SCALAR = 10


class JsonReader:
    """Reads one object of RFC 8259, from its `{` on. However deep it is, Python's stack stays flat.

    Attributes:
        status: BROKEN as soon as no text that follows could make it JSON.
        members: of the outer object, by name: where its value begins, and where it ends (None while it is
            open), in characters from the `{`. Of a name that comes twice the last one counts.
        first_key: the first of these names.
    """

    def __init__(self) -> None:
        self.status = Status.OPEN
        self.members: dict[str, tuple[int, int | None]] = {}
        self.first_key: str | None = None
        self._chars: list[str] = []
        self._stack: list[str] = []
        self._want = _Want.OBJECT
        self._is_key = False
        self._start = 0  # of the string or scalar that is open
        self._hex = 0
        self._key: str | None = None  # of the outer object's member that is open

    def feed(self, text: str) -> int:
        """Read on; how many characters belong to the object, the one that breaks it included."""
        place = 0
        while place < len(text) and self.status == Status.OPEN:
            if self._want == _Want.STRING:
                end = _PLAIN.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing, too
                if end > place:
                    self._chars.extend(text[place:end])
                    place = end
                    continue
            self._chars.append(text[place])
            self._read(text[place])
            place += 1
        return place

    def __len__(self) -> int:
        """Characters read."""
        return len(self._chars)

    @property
    def text(self) -> str:
        """What was read."""
        return "".join(self._chars)

    def slice(self, start: int, end: int | None = None) -> str:
        """A part of what was read."""
        return "".join(self._chars[start:end])

    def member(self, name: str) -> str | None:
        """The JSON text of a member that is complete."""
        start, end = self.members.get(name, (0, None))
        return None if end is None else self.slice(start, end)

    def _read(self, char: str) -> None:
        want = self._want
        if want == _Want.STRING:
            if char == '"':
                self._end_string()
            elif char == "\\":
                self._want = _Want.ESCAPE
            elif char < " ":
                self.status = Status.BROKEN
        elif want == _Want.ESCAPE:
            self._want, self._hex = (_Want.HEX, 4) if char == "u" else (_Want.STRING, 0)
            if char not in '"\\/bfnrtu':
                self.status = Status.BROKEN
        elif want == _Want.HEX:
            self._hex -= 1
            if char not in _HEX:
                self.status = Status.BROKEN
            elif not self._hex:
                self._want = _Want.STRING
        elif want == _Want.SCALAR and char in _SCALAR_CHARS:
            pass
        else:
            if want == _Want.SCALAR:
                if _SCALAR.fullmatch(self.slice(self._start, -1)) is None:
                    self.status = Status.BROKEN
                    return
                self._end_value(len(self._chars) - 1)
            if char not in SPACES or self._want == _Want.OBJECT:
                self._read_structure(char)

    def _read_structure(self, char: str) -> None:
        want = self._want
        if char == "{" and want in (_Want.OBJECT, _Want.VALUE, _Want.VALUE_OR_END):
            self._begin_value()
            self._stack.append(char)
            self._want = _Want.KEY_OR_END
        elif char == "[" and want in (_Want.VALUE, _Want.VALUE_OR_END):
            self._begin_value()
            self._stack.append(char)
            self._want = _Want.VALUE_OR_END
        elif char == '"' and want in (_Want.VALUE, _Want.VALUE_OR_END, _Want.KEY, _Want.KEY_OR_END):
            self._is_key = want in (_Want.KEY, _Want.KEY_OR_END)
            if not self._is_key:
                self._begin_value()
            self._start = len(self._chars) - 1
            self._want = _Want.STRING
        elif char in _SCALAR_CHARS and want in (_Want.VALUE, _Want.VALUE_OR_END):
            self._begin_value()
            self._start = len(self._chars) - 1
            self._want = _Want.SCALAR
        elif char == ":" and want == _Want.COLON:
            self._want = _Want.VALUE
        elif char == "," and want == _Want.COMMA_OR_END:
            self._want = _Want.KEY if self._stack[-1] == "{" else _Want.VALUE
        elif char == "}" and want in (_Want.COMMA_OR_END, _Want.KEY_OR_END) and self._stack[-1] == "{":
            self._stack.pop()
            self._end_value(len(self._chars))
        elif char == "]" and want in (_Want.COMMA_OR_END, _Want.VALUE_OR_END) and self._stack[-1] == "[":
            self._stack.pop()
            self._end_value(len(self._chars))
        else:
            self.status = Status.BROKEN

    def _begin_value(self) -> None:
        if len(self._stack) == 1 and self._key is not None:
            self.members[self._key] = (len(self._chars) - 1, None)

    def _end_value(self, end: int) -> None:
        if not self._stack:
            self.status = Status.DONE
            return
        self._want = _Want.COMMA_OR_END
        if len(self._stack) == 1 and self._key is not None:
            self.members[self._key] = (self.members[self._key][0], end)

    def _end_string(self) -> None:
        if not self._is_key:
            self._end_value(len(self._chars))
            return
        self._want = _Want.COLON
        if len(self._stack) == 1:
            self._key = json.loads(self.slice(self._start))
            if self.first_key is None:
                self.first_key = self._key
