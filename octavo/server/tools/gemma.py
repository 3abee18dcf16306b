"""Calls as FunctionGemma and Gemma 4 write them: names without quotes, texts between marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from octavo.server.tools.json_reader import SPACES
from octavo.server.tools.parser import ToolParser, partial_suffix

_NAME = re.compile(r"\s*call:\s*([^\s{}]+?)\s*\{")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:\s*")
_PLAIN = re.compile(r"[^,{}\[\]]*")
_MOST_DEPTH = 64


class _GemmaParser(ToolParser):
    """`BEGIN call:name{key:QUOTE text QUOTE,key:1,…} END`, any number of times. A call is told once it is
    complete: its arguments become JSON only then."""

    begin: str
    end: str
    quote: str

    def __init__(self, names: Collection[str], guaranteed: bool = False):
        super().__init__(names, guaranteed)
        self._buffer = ""
        self._inside = False
        self._searched = 0  # characters of the buffer in which the end mark does not begin

    def _read(self, text: str) -> None:
        self._buffer += text
        while self._buffer and self._step():
            pass

    def _step(self) -> bool:
        mark = self.end if self._inside else self.begin
        place = self._buffer.find(mark, self._searched)
        if place < 0 and self._inside:
            self._searched = max(0, len(self._buffer) - len(mark) + 1)
            return False
        if place < 0:
            held = partial_suffix(self._buffer, mark)
            self._content(self._buffer[: len(self._buffer) - held])
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        before, self._buffer = self._buffer[:place], self._buffer[place + len(mark) :]
        if self._inside and not self._call(before):
            self._content(self.begin + before + self.end)
        elif not self._inside:
            self._content(before)
        self._inside, self._searched = not self._inside, 0
        return True

    def _call(self, text: str) -> bool:
        """Tell a call; False if the text is none."""
        found = _NAME.match(text)
        if found is None:
            return False
        try:
            arguments, place = self._object(text, found.end(), 0)
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()  # half a surrogate pair is no text
        except ValueError:
            return False
        if text[place:].strip(SPACES):
            return False
        self._begin_call(found[1])
        self._arguments(written)
        return True

    def _object(self, text: str, place: int, depth: int) -> tuple[dict[str, Any], int]:
        """An object from behind its `{` on, and the place behind its `}`."""
        found: dict[str, Any] = {}
        place = _skip(text, place)
        while not text.startswith("}", place):
            if text.startswith(self.quote, place):
                name, place = self._text(text, place)
                place = _expect(text, _skip(text, place), ":")
            else:
                key = _KEY.match(text, place)
                if key is None:
                    raise ValueError("no name")
                name, place = key[1].strip("\"'"), key.end()
            found[name], place = self._value(text, _skip(text, place), depth + 1)
            place = _skip(text, place)
            if not text.startswith("}", place):
                place = _skip(text, _expect(text, place, ","))
        return found, place + 1

    def _value(self, text: str, place: int, depth: int) -> tuple[Any, int]:
        if depth > _MOST_DEPTH:
            raise ValueError("too deep")
        if text.startswith(self.quote, place):
            return self._text(text, place)
        if text.startswith("{", place):
            return self._object(text, place + 1, depth)
        if text.startswith("[", place):
            items: list[Any] = []
            place = _skip(text, place + 1)
            while not text.startswith("]", place):
                item, place = self._value(text, place, depth + 1)
                items.append(item)
                place = _skip(text, place)
                if not text.startswith("]", place):
                    place = _skip(text, _expect(text, place, ","))
            return items, place + 1
        if text.startswith('"', place):
            return json.JSONDecoder().raw_decode(text, place)
        plain = _PLAIN.match(text, place)
        word = "" if plain is None else plain[0].strip()
        if plain is None or not word:
            raise ValueError("no value")
        try:
            return json.loads(word), plain.end()
        except ValueError:
            return word, plain.end()  # a text whose marks were left out

    def _text(self, text: str, place: int) -> tuple[str, int]:
        start = place + len(self.quote)
        end = text.find(self.quote, start)
        if end < 0:
            raise ValueError("an open text")
        return text[start:end], end + len(self.quote)

    def _end(self) -> None:
        if self._inside and not self._call(self._buffer):  # a stop token may have taken the end mark's place
            self._content(self.begin + self._buffer)
        elif not self._inside:
            self._content(self._buffer)
        self._buffer = ""


class FunctionGemmaParser(_GemmaParser):
    """`<start_function_call>call:name{city:<escape>Paris<escape>}<end_function_call>`."""

    begin, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    markers = (begin, end, quote)


class Gemma4Parser(_GemmaParser):
    """`<|tool_call>call:name{city:<|"|>Paris<|"|>}<tool_call|>`."""

    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = (begin, end, quote)


def _skip(text: str, place: int) -> int:
    """The next place that is no white space."""
    while place < len(text) and text[place] in SPACES:
        place += 1
    return place


def _expect(text: str, place: int, mark: str) -> int:
    if not text.startswith(mark, place):
        raise ValueError(f"no {mark}")
    return place + 1
