"""The format of Hermes and Qwen, in every way of cutting texts as those models write them."""

from __future__ import annotations

import json

import pytest

from octavo.server.tools.hermes import HermesParser
from tests.server.tools.reading import Found, read, read_all_ways

NAMES = ["get_weather", "write_file"]
PARIS = '{"city": "Paris", "unit": "celsius"}'
NESTED = (
    '{"path": "a/b.py", "text": "x = {\\"a\\": [1]}\\n# </tool_call> é 🙂", "mode": {"n": [1, -2.5e3, null]}}'
)


def call(name: str, arguments: str, gap: str = "\n") -> str:
    return f'<tool_call>{gap}{{"name": "{name}", "arguments": {arguments}}}{gap}</tool_call>'


TEXTS: dict[str, tuple[str, Found]] = {
    "none": ("No call: a < b, {x}, <tool>.\n", Found("No call: a < b, {x}, <tool>.\n", [])),
    "alone": (call("get_weather", PARIS), Found("", [("get_weather", PARIS)])),
    "tight": (call("get_weather", "{}", ""), Found("", [("get_weather", "{}")])),
    "text before": (
        "Let me look.\n\n" + call("get_weather", PARIS),
        Found("Let me look.", [("get_weather", PARIS)]),
    ),
    "text around": (
        "One. " + call("get_weather", "{}", " ") + "\nTwo. ",
        Found("One. Two. ", [("get_weather", "{}")]),
    ),
    "several": (
        call("get_weather", PARIS) + "\n" + call("write_file", NESTED),
        Found("", [("get_weather", PARIS), ("write_file", NESTED)]),
    ),
    "nested": (call("write_file", NESTED), Found("", [("write_file", NESTED)])),
    "no arguments": ('<tool_call>{"name": "get_weather"}</tool_call>', Found("", [("get_weather", "{}")])),
    "arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "get_weather"}</tool_call>',
        Found("", [("get_weather", '{"a": 1}')]),
    ),
    "arguments as a string": (
        '<tool_call>{"name": "get_weather", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Found("", [("get_weather", '{"a": 1}')]),
    ),
    "a tool that nobody offers": (call("other", "{}"), Found("", [("other", "{}")])),
    "a brace too many": (
        '<tool_call>{"name": "get_weather", "arguments": {}}}</tool_call>',
        Found("}</tool_call>", [("get_weather", "{}")]),
    ),
    "no end mark": (call("get_weather", PARIS).split("\n</")[0], Found("", [("get_weather", PARIS)])),
}
BROKEN = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"a": 1,}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"a": "x}}\n</tool_call> more',
    '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>{'name': 'get_weather'}</tool_call>",
    '<tool_call>{"name": "get_weather", "arguments": {"n": 01}}</tool_call>',
    "<tool_call>get_weather()</tool_call>",
    "<tool_call></tool_call>",
    "text <tool_call>",
    "text <tool_ca",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("guaranteed", [False, True])
def test_what_is_found(name: str, guaranteed: bool) -> None:
    if guaranteed and name in ("arguments first", "arguments as a string"):
        pytest.skip("no grammar of ours allows it")
    text, found = TEXTS[name]
    assert read_all_ways(lambda: HermesParser(NAMES, guaranteed), text) == found


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read_all_ways(lambda: HermesParser(NAMES), text) == Found(text, [])


def test_a_call_after_a_broken_one_is_found() -> None:
    text = BROKEN[0] + "\n" + call("get_weather", PARIS)
    assert read_all_ways(lambda: HermesParser(NAMES), text) == Found(BROKEN[0], [("get_weather", PARIS)])


def test_a_guaranteed_call_is_told_as_it_comes() -> None:
    text = call("get_weather", PARIS)
    parser = HermesParser(NAMES, guaranteed=True)
    deltas = [call for char in text for call in parser.feed(char).calls]
    assert (deltas[0].name, deltas[0].arguments) == ("get_weather", "{")
    assert [delta.arguments for delta in deltas] == list(PARIS)
    cut = HermesParser(NAMES, guaranteed=True)
    assert read(cut, [text[: text.index("ris")]]) == Found("", [("get_weather", '{"city": "Pa')])
    assert cut.cut and not parser.cut


def test_depth_costs_no_stack() -> None:
    deep = '{"a": ' * 50_000 + "{}" + "}" * 50_000
    assert read(HermesParser(NAMES), [call("write_file", deep)]) == Found("", [("write_file", deep)])


@pytest.mark.parametrize("guaranteed", [False, True])
def test_time_grows_with_the_text_alone(guaranteed: bool) -> None:
    text = call("write_file", json.dumps({"text": "line\n" * 40_000}))
    found = read(HermesParser(NAMES, guaranteed), [text[i : i + 3] for i in range(0, len(text), 3)])
    assert json.loads(found.calls[0][1])["text"] == "line\n" * 40_000
