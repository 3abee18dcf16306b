"""Calls as Mistral's models write them: lists of JSON objects, and since tokenizer version 11 names with
arguments."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Collection

from octavo.server.tools.json_call import JsonCall
from octavo.server.tools.json_reader import SPACES, JsonReader, Status
from octavo.server.tools.parser import ToolParser, partial_suffix
from octavo.server.tools.shape import CallShape, SpecialId

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ALPHABET = string.ascii_letters + string.digits
_ID_FORM = re.compile("[a-zA-Z0-9]{9}")
_MOST_NAME = 512  # characters of a name, with what may stand beside it


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` (with `[CALL_ID]…`
    before the arguments, or without `[ARGS]`), any number of times.

    Ids have nine letters and digits: the models' templates refuse others.
    """

    markers = (_CALLS, _ARGS, _ID)

    def __init__(self, names: Collection[str], guaranteed: bool = False):
        super().__init__(names, guaranteed)
        self._buffer = ""
        self._raw = ""  # from the mark, or the last call, up to the buffer: content if no call comes
        self._reader: JsonCall | _NamedCall | None = None
        self._in_list = False
        self._marked = False  # the mark has been read, and no call after it yet
        self._telling = False

    @classmethod
    def shape(cls, special_id: SpecialId) -> CallShape:
        """See `ToolParser`."""
        if special_id(_ARGS) is not None:
            return CallShape(lead=[_CALLS], name=["NAME", _ARGS])
        return CallShape(
            first=[_CALLS, "["],
            name=['{"name": "NAME", "arguments": '],
            tail=["}"],
            between=[", "],
            last=["]"],
        )

    def _read(self, text: str) -> None:
        self._buffer += text
        while self._buffer and self._step():
            pass

    def _step(self) -> bool:
        if self._reader is not None:
            return self._read_call(self._reader)
        if self._in_list:
            return self._read_list()
        return self._read_begin() if self._marked else self._read_text()

    def _read_text(self) -> bool:
        place = self._buffer.find(_CALLS)
        held = 0 if place >= 0 else partial_suffix(self._buffer, _CALLS)
        end = place if place >= 0 else len(self._buffer) - held
        self._content(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if place < 0:
            return False
        self._marked = True
        self._move(len(_CALLS))
        return True

    def _read_begin(self) -> bool:
        """Behind the mark: a list, or a name."""
        self._move(len(self._buffer) - len(self._buffer.lstrip(SPACES)))
        if not self._buffer:
            return False
        self._marked = False
        if self._buffer[0] == "[":
            self._in_list = True
            self._move(1)
        else:
            self._reader = _NamedCall()
        return True

    def _read_list(self) -> bool:
        """Between the calls of a list."""
        self._move(len(self._buffer) - len(self._buffer.lstrip(SPACES + ",")))
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._reader = JsonCall()
            return True
        self._in_list = False
        if self._buffer[0] == "]" and _CALLS not in self._raw:  # a call has been told
            self._buffer, self._raw = self._buffer[1:], ""
        else:
            self._give_up("")
        return True

    def _move(self, count: int) -> None:
        self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self, read: str) -> None:
        self._content(self._raw + read)
        self._raw = ""

    def _read_call(self, reader: JsonCall | _NamedCall) -> bool:
        before = self._buffer
        self._buffer = self._buffer[reader.feed(self._buffer) :]
        if self._guaranteed:
            self._tell(reader)
        if reader.status == Status.DONE:
            if not self._telling:
                self._begin_call(reader.name or "", reader.call_id)
                self._arguments(reader.arguments() or "{}")
        elif reader.status == Status.BROKEN:
            self._in_list = False
            if not self._telling:
                self._give_up(reader.text)
        if reader.status != Status.OPEN:
            self._reader, self._raw, self._telling = None, "", False
        return self._buffer != before

    def _tell(self, reader: JsonCall | _NamedCall) -> None:
        piece = reader.new_arguments() if reader.name is not None else None
        if piece is not None and not self._telling:
            self._begin_call(reader.name or "", reader.call_id)
            self._telling, self._raw = True, ""
        if piece:
            self._arguments(piece)

    def _end(self) -> None:
        self.cut = self._telling
        if not self._telling:
            rest = self._raw + ("" if self._reader is None else self._reader.text) + self._buffer
            if not self.num_calls or rest.strip(SPACES + ","):
                self._content(rest)
        self._buffer = ""

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        super()._begin_call(name, call_id if call_id and _ID_FORM.fullmatch(call_id) else None)

    def _new_id(self) -> str:
        return "".join(random.choices(_ALPHABET, k=9))


class _NamedCall:
    """`name[ARGS]{…}`, with `[CALL_ID]id` before the arguments, or with neither."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.call_id: str | None = None
        self._head = ""
        self._json: JsonReader | None = None
        self._told = 0
        self._broken = False

    @property
    def status(self) -> Status:
        if self._broken:
            return Status.BROKEN
        return Status.OPEN if self._json is None else self._json.status

    @property
    def text(self) -> str:
        """What was read."""
        return self._head + ("" if self._json is None else self._json.text)

    def feed(self, text: str) -> int:
        """Read on; how many characters belong to the call."""
        if self._json is not None:
            return self._json.feed(text)
        for count, char in enumerate(text):
            if char == "{":
                self._end_head()
                if self._broken or self._json is None:
                    return count
                return count + self._json.feed(text[count:])
            self._head += char
            if char == "\n" or len(self._head) > _MOST_NAME:
                self._broken = True
                return count + 1
        return len(text)

    def _end_head(self) -> None:
        name, _, rest = self._head.partition(_ID)
        if rest:
            call_id, _, rest = rest.partition(_ARGS)
            self.call_id = call_id.strip() or None
        else:
            name, _, rest = name.partition(_ARGS)
        name = name.strip()
        self._broken = not name or " " in name or bool(rest.strip())
        if not self._broken:
            self.name, self._json = name, JsonReader()

    def arguments(self) -> str:
        """The arguments as JSON text."""
        return "{}" if self._json is None else self._json.text

    def new_arguments(self) -> str | None:
        """What has come of the arguments since the last call; None before they begin."""
        if self._json is None or not len(self._json):
            return None
        piece = self._json.slice(self._told)
        self._told = len(self._json)
        return piece
