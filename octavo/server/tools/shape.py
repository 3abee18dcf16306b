"""How a format writes calls, as far as a grammar needs to know, and the grammars made from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.sampling.structured.lark import ANY_TEXT, json_expression, marker, nested
from octavo.server.tools.protocol import FunctionDefinition, parameters_of

SpecialId = Callable[[str], int | None]
"""The id of the special token that a text is, if it is one."""

_NO_CALL = r"/[ \t\r\n]*([^ \t\r\n{](.|\n)*)?/"


@dataclass(frozen=True)
class CallShape:
    """Calls are `first`, then each call, `between` them, then `last`; a call is `lead`, `name`, its
    arguments as JSON, `tail`. Marks that may be special tokens stand alone in their lists.

    Attributes:
        name: what stands between `lead` and the arguments, `NAME` for the name and `"NAME"` for its JSON.
        marked: whether calls begin with a mark that other text does not have.
    """

    name: Sequence[str]
    first: Sequence[str] = ()
    lead: Sequence[str] = ()
    tail: Sequence[str] = ()
    between: Sequence[str] = ()
    last: Sequence[str] = ()
    marked: bool = True


class CallGrammar:
    """Grammars of answers that call some tools.

    A strict tool's schema must be one that the compiler follows as a whole; of other tools' schemas it
    passes over what it does not know.

    Args:
        parallel: several calls may follow each other.
    """

    def __init__(
        self, shape: CallShape, tools: Sequence[FunctionDefinition], parallel: bool, special_id: SpecialId
    ):
        self._shape, self._special_id = shape, special_id
        self._many = parallel
        self._rules: list[str] = []
        bodies = []
        for i, tool in enumerate(tools):
            head = [_named(piece, tool.name) for piece in shape.name]
            self._rules.append(f"tool_{i}: {self._pieces(head)} {_arguments(tool)}")
            bodies.append(f"tool_{i}")
        self._rules.append(f"call_body: ({' | '.join(bodies)}) {self._pieces(shape.tail)}")

    def required(self) -> str:
        """Calls and nothing else."""
        return self._grammar(f"start: {self._calls()}")

    def optional(self) -> str:
        """Free text, in which whatever begins as a call is one."""
        shape = self._shape
        if not shape.marked:
            return self._grammar(f"start: {self._calls()} | NO_CALL", f"NO_CALL: {_NO_CALL}")
        mark = (shape.first or shape.lead)[0]
        if shape.first:
            rest = f"{self._pieces(shape.first[1:])} {self._call()} {self._more()} {self._pieces(shape.last)}"
        else:
            rest = f"{self._pieces(shape.lead[1:])} call_body"
        begin = marker(mark, self._special_id)
        if begin.startswith("<"):
            rules = [f"tag: FREE {begin} {rest}"]
        else:
            rules = [f"tag: tag_begin {rest}", f"tag_begin[lazy]: FREE {begin}"]
        return self._grammar(f"start: tag{'*' if self._many else '?'} FREE", *rules, f"FREE: {ANY_TEXT}")

    def or_form(self, form: str) -> str:
        """Calls, or a text of a whole grammar."""
        return self._grammar(f"start: {self._calls()} | content", f"content: {nested(form)}")

    def _calls(self) -> str:
        shape = self._shape
        return f"{self._pieces(shape.first)} {self._call()} {self._more()} {self._pieces(shape.last)}"

    def _call(self) -> str:
        return f"{self._pieces(self._shape.lead)} call_body"

    def _more(self) -> str:
        return f"({self._pieces(self._shape.between)} {self._call()})*" if self._many else ""

    def _pieces(self, pieces: Sequence[str]) -> str:
        return " ".join(marker(piece, self._special_id) for piece in pieces)

    def _grammar(self, *rules: str) -> str:
        return "\n".join([*rules, *self._rules]) + "\n"


def _named(piece: str, name: str) -> str:
    # One or the other: a name may itself hold the word.
    if '"NAME"' in piece:
        return piece.replace('"NAME"', json.dumps(name, ensure_ascii=False))
    return piece.replace("NAME", name)


def _arguments(tool: FunctionDefinition) -> str:
    """The arguments' grammar: a name that the schema does not declare is no argument."""
    schema = dict(parameters_of(tool))
    schema.setdefault("type", "object")
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return json_expression(schema, lenient=not tool.strict)
