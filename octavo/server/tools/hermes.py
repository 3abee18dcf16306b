"""Calls as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write them (their chat templates)."""

from __future__ import annotations

from octavo.server.tools.shape import CallShape, SpecialId
from octavo.server.tools.tagged import TaggedJsonParser


class HermesParser(TaggedJsonParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of times, text around them."""

    begin, end = "<tool_call>", "</tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    @classmethod
    def shape(cls, special_id: SpecialId) -> CallShape:
        """See `ToolParser`."""
        return CallShape(
            lead=[cls.begin],
            name=['\n{"name": "NAME", "arguments": '],
            tail=["}\n", cls.end],
            between=["\n"],
        )
