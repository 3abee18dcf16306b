"""Formats in which each call is a JSON object between two marks."""

from __future__ import annotations

from collections.abc import Collection

from octavo.server.tools.json_call import JsonCall
from octavo.server.tools.json_reader import SPACES, Status
from octavo.server.tools.parser import ToolParser, partial_suffix


class TaggedJsonParser(ToolParser):
    """`BEGIN {"name": …, "arguments": {…}} END`, any number of times."""

    begin: str
    end: str

    def __init__(self, names: Collection[str], guaranteed: bool = False):
        super().__init__(names, guaranteed)
        self._buffer = ""
        self._call: JsonCall | None = None  # between the marks
        self._lead = ""  # the mark and white space before the call's `{`
        self._telling = False
        self._ending = False  # behind a call, where its end mark may come

    def _read(self, text: str) -> None:
        self._buffer += text
        while self._buffer and self._step():
            pass

    def _step(self) -> bool:
        """Take something from the buffer; False if more text is needed."""
        if self._ending:
            return self._read_end()
        return self._read_text() if self._call is None else self._read_call(self._call)

    def _read_text(self) -> bool:
        place = self._buffer.find(self.begin)
        if place >= 0:
            self._content(self._buffer[:place])
            self._buffer = self._buffer[place + len(self.begin) :]
            self._call, self._lead = JsonCall(), self.begin
            return True
        held = partial_suffix(self._buffer, self.begin)
        self._content(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _read_call(self, call: JsonCall) -> bool:
        if not call.begun:
            rest = self._buffer.lstrip(SPACES)
            self._lead += self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
            if not rest:
                return False
        self._buffer = self._buffer[call.feed(self._buffer) :]
        if self._guaranteed and call.name is not None:
            self._tell(call)
        if call.status == Status.DONE:
            if not self._telling:
                assert call.name is not None
                self._begin_call(call.name)
                self._arguments(call.arguments() or "{}")
            self._leave(ending=True)
        elif call.status == Status.BROKEN:
            if not self._telling:
                self._content(self._lead + call.text)
            self._leave(ending=False)
        return True

    def _tell(self, call: JsonCall) -> None:
        piece = call.new_arguments()
        if not self._telling and piece is not None:
            assert call.name is not None
            self._begin_call(call.name)
            self._telling = True
        if piece:
            self._arguments(piece)

    def _leave(self, ending: bool) -> None:
        self._call, self._lead, self._telling, self._ending = None, "", False, ending

    def _read_end(self) -> bool:
        """Drop the mark that ends a call; whatever else stands there is content."""
        rest = self._buffer.lstrip(SPACES)
        if rest.startswith(self.end):
            self._buffer = rest[len(self.end) :]
        elif self.end.startswith(rest):
            self._buffer = rest
            return False
        self._ending = False
        return True

    def _end(self) -> None:
        self.cut = self._telling
        if self._call is not None and not self._telling:
            self._content(self._lead + self._call.text)
        if not (self._ending and self.end.startswith(self._buffer)):
            self._content(self._buffer)
        self._buffer = ""
        self._call = None
