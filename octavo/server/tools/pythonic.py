"""Calls as Python code: what Gemma 3 is prompted for, and Llama 3.2 and others write."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from octavo.server.tools.json_reader import SPACES
from octavo.server.tools.parser import ToolParser

_BEGIN = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_MAYBE = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*)?)?")
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """`[get_weather(city="Paris"), get_time()]` at the beginning of a text. Calls are told once the list is
    complete: arguments become JSON only then."""

    def __init__(self, names: Collection[str], guaranteed: bool = False):
        super().__init__(names, guaranteed)
        self._buffer = ""
        self._over = False  # the list has been read, or there is none
        self._place = 0  # up to which brackets have been followed
        self._depth = 0
        self._quote = ""

    def _read(self, text: str) -> None:
        self._buffer += text
        if not self._over and self._begins() and (end := self._list_end()):
            calls = _calls(self._buffer[:end])
            if calls is not None:
                self._buffer = self._buffer[end:]
                for name, arguments in calls:
                    self._begin_call(name)
                    self._arguments(arguments)
            self._over = True
        if self._over:
            self._content(self._buffer)
            self._buffer = ""

    def _begins(self) -> bool:
        """Whether the text begins a list of calls for sure."""
        if _BEGIN.match(self._buffer) is not None:
            return True
        self._over = _MAYBE.fullmatch(self._buffer) is None
        return False

    def _list_end(self) -> int:
        """The place behind the list; 0 while it is open."""
        text = self._buffer
        while self._place < len(text):
            char = text[self._place]
            if self._quote:
                if char == "\\":
                    if self._place + 1 == len(text):
                        return 0
                    self._place += 1
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return self._place + 1
            self._place += 1
        return 0

    def _end(self) -> None:
        self._content(self._buffer)
        self._buffer = ""


def _calls(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments (JSON) of a list of calls; None if the text is none."""
    try:
        tree = ast.parse(text.strip(SPACES), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [_call(item) for item in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("no call by names")
    arguments = {str(word.arg): _value(word.value) for word in node.keywords}
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()
    return ast.unparse(node.func), written


def _value(node: ast.expr) -> Any:
    """A literal, with Python's or JSON's names."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _value(node)
    if not isinstance(key, str):
        raise ValueError("a key that is no text")
    return key
