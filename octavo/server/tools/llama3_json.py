"""Calls as Llama 3.1 and later write them: a JSON object without a mark."""

from __future__ import annotations

from collections.abc import Collection

from octavo.server.tools.json_call import JsonCall
from octavo.server.tools.json_reader import SPACES, Status
from octavo.server.tools.parser import ToolParser, partial_suffix
from octavo.server.tools.shape import CallShape, SpecialId

_MARK = "<|python_tag|>"
_FIRST_KEYS = frozenset(("name", "type", "parameters", "arguments"))


class Llama3JsonParser(ToolParser):
    """`{"name": …, "parameters": {…}}`, several with `;` or white space between them.

    Since nothing marks a call, an object is one if it begins a line (or follows `<|python_tag|>` or another
    call) and names a tool that the request offers; any other is content. One whose first key no call has
    is told at once.
    """

    markers = (_MARK,)

    def __init__(self, names: Collection[str], guaranteed: bool = False):
        super().__init__(names, guaranteed)
        self._buffer = ""
        self._call: JsonCall | None = None
        self._lead = ""  # what stands before the call and belongs to it
        self._telling = False
        self._line_start = True  # only white space stands before the buffer in its line
        self._between = False  # a call stands right before the buffer

    @classmethod
    def shape(cls, special_id: SpecialId) -> CallShape:
        """See `ToolParser`."""
        return CallShape(name=['{"name": "NAME", "parameters": '], tail=["}"], between=["; "], marked=False)

    def _read(self, text: str) -> None:
        self._buffer += text
        while self._buffer:
            if not (self._read_text() if self._call is None else self._read_call(self._call)):
                return

    def _read_text(self) -> bool:
        """Take text up to a place where a call may begin; False if more text is needed."""
        buffer = self._buffer
        rest = buffer.lstrip(SPACES)
        if self._between and rest.startswith(";"):
            rest = rest[1:].lstrip(SPACES)
        marked = rest.startswith(_MARK)
        if marked:
            rest = rest[len(_MARK) :].lstrip(SPACES)
        if rest.startswith("{") and (marked or self._between or self._starts_line(buffer)):
            self._lead, self._buffer = buffer[: len(buffer) - len(rest)], rest
            self._call = JsonCall()
            return True
        if not rest or (not marked and _MARK.startswith(rest)):
            return False
        self._pass_on(buffer)
        return bool(self._buffer) and self._buffer != buffer

    def _starts_line(self, lead: str) -> bool:
        """Whether an object that only white space of the buffer stands before begins its line."""
        space = lead[: len(lead) - len(lead.lstrip(SPACES))]
        return self._line_start or "\n" in space

    def _pass_on(self, buffer: str) -> None:
        """Tell text up to the next place where a call may begin, at least its first character."""
        first = len(buffer) - len(buffer.lstrip(SPACES)) + 1
        ends = [place for mark in ("\n", _MARK) if (place := buffer.find(mark, first)) >= 0]
        end = min(ends) if ends else len(buffer) - partial_suffix(buffer[first:], _MARK)
        told = buffer[:end]
        self._content(told)
        self._between = False
        self._line_start = not told.rpartition("\n")[2].strip(SPACES) and ("\n" in told or self._line_start)
        self._buffer = buffer[end:]

    def _read_call(self, call: JsonCall) -> bool:
        self._buffer = self._buffer[call.feed(self._buffer) :]
        known = call.name is None or call.name in self._names
        plausible = call.first_key is None or call.first_key in _FIRST_KEYS
        if call.status == Status.BROKEN or not known or not plausible:
            if not self._telling:
                self._content(self._lead + call.text)
            self._leave(between=False)
            return True
        if self._guaranteed and call.name is not None:
            self._tell(call, call.name)
        if call.status == Status.DONE:
            if not self._telling:
                assert call.name is not None
                self._begin_call(call.name)
                self._arguments(call.arguments() or "{}")
            self._leave(between=True)
        return True

    def _tell(self, call: JsonCall, name: str) -> None:
        piece = call.new_arguments()
        if piece is not None and not self._telling:
            self._begin_call(name)
            self._telling = True
        if piece:
            self._arguments(piece)

    def _leave(self, between: bool) -> None:
        self._call, self._lead, self._telling = None, "", False
        self._between, self._line_start = between, False

    def _end(self) -> None:
        self.cut = self._telling
        if self._call is not None and not self._telling:
            self._content(self._lead + self._call.text)
        elif not self._between or self._buffer.strip(SPACES + ";"):
            self._content(self._buffer)
        self._buffer = ""
