"""The formats whose arguments are not JSON, in every way of cutting texts as those models write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.server.tools.gemma import FunctionGemmaParser, Gemma4Parser
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.pythonic import PythonicParser
from tests.server.tools.reading import Found, read, read_all_ways

GEMMA = [
    ("alone", "Bcall:f{city:QParis, {é}Q,days:3}E", Found("", [("f", '{"city": "Paris, {é}", "days": 3}')])),
    ("none", "No call:f{} < at <| all.", Found("No call:f{} < at <| all.", [])),
    ("no arguments", "Bcall:get_time{}E", Found("", [("get_time", "{}")])),
    ("around", "I look.\nBcall:get_time{}E so", Found("I look.\nso", [("get_time", "{}")])),
    (
        "nested",
        "Bcall:f{a:[1,-2.5,QxQ,[]],o:{k:QvQ,QoddQ:null},b:true, s:bare}EBcall:g{}E",
        Found(
            "",
            [
                ("f", '{"a": [1, -2.5, "x", []], "o": {"k": "v", "odd": null}, "b": true, "s": "bare"}'),
                ("g", "{}"),
            ],
        ),
    ),
    ("JSON's quotes", 'Bcall:f{"a":"x\\"y"}E', Found("", [("f", '{"a": "x\\"y"}')])),
    ("end mark missing", "Bcall:f{a:1}", Found("", [("f", '{"a": 1}')])),
    ("text open", "Bcall:f{a:QxE tail", Found("Bcall:f{a:QxE tail", [])),
    ("cut", "hm Bcall:f{a:Qx", Found("hm Bcall:f{a:Qx", [])),
    ("too much", "Bcall:f{a:1}}E", Found("Bcall:f{a:1}}E", [])),
    ("half a pair", 'Bcall:f{a:"\\ud800"}E', Found('Bcall:f{a:"\\ud800"}E', [])),
    ("no name", "B{a:1}E", Found("B{a:1}E", [])),
    ("no value", "Bcall:f{a:,b:1}E", Found("Bcall:f{a:,b:1}E", [])),
    ("cut mark", "a B"[:-1] + "<", Found("a <", [])),
]  # fmt: skip
MARKS = {FunctionGemmaParser: ("<start_function_call>", "<end_function_call>", "<escape>"),
         Gemma4Parser: ("<|tool_call>", "<tool_call|>", '<|"|>')}  # fmt: skip


@pytest.mark.parametrize("parser", MARKS)
@pytest.mark.parametrize(("text", "found"), [case[1:] for case in GEMMA], ids=[case[0] for case in GEMMA])
def test_gemma(parser: type[ToolParser], text: str, found: Found) -> None:
    def marked(text: str) -> str:
        for letter, mark in zip("BEQ", MARKS[parser], strict=True):
            text = text.replace(letter, mark)
        return text

    content = marked(found.content) if not found.calls else found.content
    assert read_all_ways(lambda: parser([]), marked(text)) == Found(content, found.calls)


PYTHONIC = [
    ('[f(city="Paris ])é", days=[1, -2.5], deep={"a": None, \'b\': true})]',
     Found("", [("f", '{"city": "Paris ])é", "days": [1, -2.5], "deep": {"a": null, "b": true}}')])),
    ("[get_time()]", Found("", [("get_time", "{}")])),
    ("\n[ a.b(x='it\\'s'),\n g() ] done", Found("done", [("a.b", '{"x": "it\'s"}'), ("g", "{}")])),
]  # fmt: skip
PLAIN = [
    "", "  ", "[", "[get_time", "[get_time(", "[1, 2]", "Well: [get_time()]", '[f(a="x', "[f(1)]", "[f(**a)]",
    "[f(a=b)]", "[f(a=1), 2]", "[f(a=open('x'))]", "[f(a=1)] "[:-2] + "}", '[f(a={1: 2})]', "[f(a=1e999)]",
    "[f(a='\\ud800')]", "[f(" + "(" * 300,
]  # fmt: skip


@pytest.mark.parametrize(("text", "found"), PYTHONIC)
def test_pythonic(text: str, found: Found) -> None:
    assert read_all_ways(lambda: PythonicParser([]), text) == found


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_python_call_is_content(text: str) -> None:
    assert read_all_ways(lambda: PythonicParser([]), text) == Found(text, [])


@pytest.mark.parametrize(
    ("make", "deep"),
    [
        (lambda: Gemma4Parser([]), "<|tool_call>call:f{a:" + "[" * 5000 + "]" * 5000 + "}<tool_call|>"),
        (lambda: PythonicParser([]), "[f(a=" + "[" * 5000 + "]" * 5000 + ")]"),
    ],
)
def test_what_is_too_deep_is_content(make: Callable[[], ToolParser], deep: str) -> None:
    assert read(make(), [deep]) == Found(deep, [])
