"""Grammars of calls: what they let through is what the parsers find, and nothing else gets through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.sampling.structured.backend import Vocabulary
from octavo.sampling.structured.llguidance_backend import LLGuidanceBackend
from octavo.server.tools.hermes import HermesParser
from octavo.server.tools.json_list import JsonListParser
from octavo.server.tools.llama3_json import Llama3JsonParser
from octavo.server.tools.mistral import MistralParser
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.protocol import FunctionDefinition
from octavo.server.tools.shape import CallGrammar, CallShape
from octavo.structured_outputs import StructuredOutputsParams
from tests.server.tools.reading import read_all_ways

SPECIAL = {"[TOOL_CALLS]": 258, "[ARGS]": 259}
TOOLS = [
    FunctionDefinition(
        'say_"é"',
        parameters={
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/who"}},
            "required": ["to"],
            "$defs": {"who": {"type": "string", "maxLength": 3}},
        },
        strict=True,
    ),
    FunctionDefinition("wait"),
]
SAY, WAIT = ('say_"é"', '{"to": "you"}'), ("wait", "{}")
BAD_SAYS = [
    ('say_"é"', '{"to": "everybody"}'),
    ('say_"é"', "{}"),
    ('say_"é"', '{"to": "me", "at": 1}'),
    ("go", "{}"),
]


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(n, ensure_ascii=False)}, "arguments": {a}}}\n</tool_call>'
        for n, a in calls
    )


def objects(key: str, between: str, *calls: tuple[str, str]) -> str:
    return between.join(f'{{"name": {json.dumps(n, ensure_ascii=False)}, "{key}": {a}}}' for n, a in calls)


def llama(*calls: tuple[str, str]) -> str:
    return objects("parameters", "; ", *calls)


def listed(*calls: tuple[str, str]) -> str:
    return "[" + objects("parameters", ", ", *calls) + "]"


def mistral(*calls: tuple[str, str]) -> str:
    return "[TOOL_CALLS][" + objects("arguments", ", ", *calls) + "]"


def mistral_named(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)


FORMATS: list[tuple[type[ToolParser], Any, dict[str, int]]] = [
    (HermesParser, hermes, {}),
    (HermesParser, hermes, {"<tool_call>": 258}),
    (Llama3JsonParser, llama, {}),
    (JsonListParser, listed, {}),
    (MistralParser, mistral, {}),
    (MistralParser, mistral, {"[TOOL_CALLS]": 258}),
    (MistralParser, mistral_named, SPECIAL),
]


class Texts:
    """Whether a grammar takes a text, in a vocabulary of bytes and some special tokens."""

    def __init__(self, special: dict[str, int]):
        self._special = special
        tokens = [bytes([i]) for i in range(256)] + [b"<s>", b"</s>"] + [s.encode() for s in special]
        self._backend = LLGuidanceBackend(
            Vocabulary(tokens, [256, 257, *special.values()], [257], lambda text: self._encode(text))
        )

    def _encode(self, text: str) -> list[int]:
        for mark, token in self._special.items():
            head, found, tail = text.partition(mark)
            if found:
                return self._encode(head) + [token] + self._encode(tail)
        return list(text.encode())

    def takes(self, grammar: str, text: str) -> bool:
        ids = self._encode(text)
        state = self._backend.compile(StructuredOutputsParams(grammar=grammar)).new_state()
        return state.accept(ids) == len(ids) and (state.is_terminated or state.accept([257]) == 1)


@pytest.mark.parametrize("place", range(len(FORMATS)))
def test_what_is_allowed_is_what_is_found(place: int) -> None:
    parser, write, special = FORMATS[place]
    texts = Texts(special)
    shape = parser.shape(special.get)
    assert shape is not None
    grammar = CallGrammar(shape, TOOLS, True, special.get)
    one = CallGrammar(shape, TOOLS, False, special.get)
    for calls in ([SAY], [WAIT], [SAY, WAIT, SAY]):
        text = write(*calls)
        assert texts.takes(grammar.required(), text)
        assert texts.takes(one.required(), text) == (len(calls) == 1)
        found = read_all_ways(lambda: parser([t.name for t in TOOLS], True), text)
        assert found == ("", calls)
    for bad in BAD_SAYS:
        assert not texts.takes(grammar.required(), write(bad))
    for text in ("", "Well.", "Well. " + write(SAY), write(SAY) + "x"):
        assert not texts.takes(grammar.required(), text)
    form = 'start: %json {"type": "integer"}'
    for text, good in ((write(SAY), True), ("12", True), ("Well.", False), (write(BAD_SAYS[0]), False)):
        assert texts.takes(grammar.or_form(form), text) == good
    if parser is JsonListParser:
        return  # it is never chosen freely
    lead = "" if parser is Llama3JsonParser else "Well.\n"
    for text in ("Well, {} [so].\n", lead + write(SAY), lead + write(WAIT, SAY)):
        assert texts.takes(grammar.optional(), text)
    for bad in BAD_SAYS:
        assert not texts.takes(grammar.optional(), lead + write(bad))


def test_a_tool_s_name_may_hold_any_word() -> None:
    tool = FunctionDefinition("RENAME_NAME")
    for shape in (HermesParser.shape({}.get), CallShape(lead=["[C]"], name=["NAME", "[ARGS]"])):
        grammar = CallGrammar(shape, [tool], True, {}.get).required()
        assert grammar.count("NAME") == 2 and "RENAME_NAME" in grammar


def test_a_schema_that_cannot_be_followed_is_refused_where_it_is_strict() -> None:
    from octavo.errors import RequestError

    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    texts = Texts({})
    for strict in (True, False):
        tool = FunctionDefinition("f", parameters=parameters, strict=strict)
        grammar = CallGrammar(HermesParser.shape({}.get), [tool], True, {}.get).required()
        if strict:
            with pytest.raises(RequestError, match="uniqueItems"):
                texts.takes(grammar, "")
        else:
            assert texts.takes(grammar, hermes(("f", '{"a": [1, 1]}')))
