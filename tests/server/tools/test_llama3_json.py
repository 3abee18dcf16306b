"""Llama's format, which marks no call, in every way of cutting texts as those models write them."""

from __future__ import annotations

import pytest

from octavo.server.tools.llama3_json import Llama3JsonParser
from tests.server.tools.reading import Found, read, read_all_ways

NAMES = ["get_weather", "get_time"]
PARIS = '{"city": "Paris \\"}é", "days": [1, {"a": null}]}'


def call(name: str = "get_weather", arguments: str = PARIS, key: str = "parameters") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


ONE = [("get_weather", PARIS)]
TWO = [("get_weather", "{}"), ("get_time", "{}")]
A, B = call(arguments="{}"), call("get_time", "{}")
TEXTS: dict[str, tuple[str, Found]] = {
    "alone": (call(), Found("", ONE)),
    "arguments": (call(key="arguments"), Found("", ONE)),
    "type first": ('{"type": "function", "name": "get_time", "parameters": {}}', Found("", TWO[1:])),
    "marked": ("<|python_tag|>" + call(), Found("", ONE)),
    "marked in a line": ("Well: <|python_tag|> " + A, Found("Well:", TWO[:1])),
    "semicolon": (f"{A}; {B}", Found("", TWO)),
    "lines": (f"{A}\n{B}\n", Found("", TWO)),
    "marks": (f"<|python_tag|>{A};<|python_tag|>{B}", Found("", TWO)),
    "text before": (f"I look {{it}} up.\n\n{A}", Found("I look {it} up.", TWO[:1])),
    "text after": (f"{A}\nThat is it.", Found("That is it.", TWO[:1])),
    "semicolon and text": (f"{A}; so", Found("; so", TWO[:1])),
    "semicolon at the end": (f"{A}; ", Found("", TWO[:1])),
}
PLAIN = [
    "Nothing { at } all; <|python",
    "so <|python_tag|>print(1)",
    'The form is {"name": "get_weather", "parameters": {}} on one line.',
    '{"name": "Bob", "age": 3}',
    '{"city": "Paris",\n"temperature": {\n"c": 3}}',
    '[{"name": "get_weather", "parameters": {}}]',
    '{"name": "get_weather", "parameters": {"a": 1,}}',
    '{"name": "get_weather", "parameters": [1]}',
    '{"name": "get_weather", "parameters": {"a": "b',
    " \n ",
    "",
    "<|python_tag|>",
    '{"parameters": {}}\n',
]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("guaranteed", [False, True])
def test_what_is_found(name: str, guaranteed: bool) -> None:
    text, found = TEXTS[name]
    assert read_all_ways(lambda: Llama3JsonParser(NAMES, guaranteed), text) == found


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read_all_ways(lambda: Llama3JsonParser(NAMES), text) == Found(text, [])


def test_an_object_that_is_no_call_is_told_as_it_comes() -> None:
    parser = Llama3JsonParser(NAMES)
    assert parser.feed('{"city": "Pa').content == '{"city": "Pa'
    assert parser.feed('ris"}').content == 'ris"}'


def test_a_guaranteed_call_is_told_as_it_comes() -> None:
    parser = Llama3JsonParser(NAMES, guaranteed=True)
    deltas = [call for char in call() for call in parser.feed(char).calls]
    assert [delta.arguments for delta in deltas] == list(PARIS)
    cut = Llama3JsonParser(NAMES, guaranteed=True)
    assert read(cut, [call()[:50]]).calls[0][1] and cut.cut
