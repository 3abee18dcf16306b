"""A list of calls as JSON: the form that answers have where no format of the model's own can be enforced."""

from __future__ import annotations

from collections.abc import Collection

from octavo.server.tools.json_call import JsonCall
from octavo.server.tools.json_reader import SPACES, Status
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.shape import CallShape, SpecialId


class JsonListParser(ToolParser):
    """`[{"name": …, "parameters": {…}}, …]`, as a grammar guarantees it."""

    def __init__(self, names: Collection[str], guaranteed: bool = False):
        super().__init__(names, guaranteed)
        self._call: JsonCall | None = None
        self._telling = False
        self._held = ""  # what has been read of the list and is no call, and may be none at the end

    @classmethod
    def shape(cls, special_id: SpecialId) -> CallShape:
        """See `ToolParser`."""
        return CallShape(
            first=["["], name=['{"name": "NAME", "parameters": '], tail=["}"], between=[", "], last=["]"]
        )

    def _read(self, text: str) -> None:
        while text:
            if self._call is None:
                start = text.find("{")
                self._held += text if start < 0 else text[:start]
                if start < 0:
                    return
                text = text[start:]
                self._call = JsonCall()
            used = self._call.feed(text)
            text = text[used:]
            self._tell(self._call)
            if self._call.status != Status.OPEN:
                if not self._telling:
                    self._content(self._held + self._call.text)
                self._call, self._telling, self._held = None, False, ""

    def _tell(self, call: JsonCall) -> None:
        piece = call.new_arguments()
        if not self._telling and call.name is not None and piece is not None:
            self._begin_call(call.name)
            self._telling, self._held = True, ""
        if piece and self._telling:
            self._arguments(piece)

    def _end(self) -> None:
        self.cut = self._telling
        if self._call is not None and not self._telling:
            self._content(self._held + self._call.text)
        elif self._call is None and not (self.num_calls and not self._held.strip(SPACES + "],")):
            self._content(self._held)
