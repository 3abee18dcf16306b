"""Reads a text with a parser, in one piece and in every way of cutting it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from octavo.server.tools.parser import ToolParser


class Found(NamedTuple):
    """What is in a text: plain text, and (name, arguments) of its calls."""

    content: str
    calls: list[tuple[str, str]]


def read(parser: ToolParser, pieces: Sequence[str]) -> Found:
    """The sum of what a parser tells of a text in pieces; checks the form of what it tells."""
    content, names, arguments, ids = "", [], [], []
    for delta in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(names) and call.id and call.id not in ids
                names.append(call.name)
                ids.append(call.id)
                arguments.append(call.arguments)
            else:
                assert call.index == len(names) - 1 and call.id is None and call.arguments
                arguments[call.index] += call.arguments
    assert parser.num_calls == len(names)
    return Found(content, list(zip(names, arguments, strict=True)))


def cuts(text: str) -> Iterator[list[str]]:
    """A text by characters, cut once and cut twice, at every place."""
    yield list(text)
    for i in range(len(text) + 1):
        yield [text[:i], text[i:]]
        # Long texts have too many pairs of places: those near each other are the hard ones.
        for j in range(i, min(len(text), i + (12 if len(text) > 80 else len(text))) + 1):
            yield [text[:i], text[i:j], text[j:]]


def read_all_ways(make: Callable[[], ToolParser], text: str) -> Found:
    """What is in a text, which must not depend on how it is cut."""
    whole = read(make(), [text])
    for pieces in cuts(text):
        assert read(make(), pieces) == whole, pieces
    return whole
