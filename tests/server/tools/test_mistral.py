"""Mistral's two formats, in every way of cutting texts as those models write them."""

from __future__ import annotations

import re

import pytest

from octavo.server.tools.mistral import MistralParser
from tests.server.tools.reading import Found, read, read_all_ways

PARIS = '{"city": "Paris ]é", "days": [1, {"a": null}]}'
ITEM = f'{{"name": "get_weather", "arguments": {PARIS}}}'
ONE, TWO = [("get_weather", PARIS)], [("get_weather", PARIS), ("get_time", "{}")]
TEXTS: dict[str, tuple[str, Found]] = {
    "list": (f"[TOOL_CALLS][{ITEM}]", Found("", ONE)),
    "list with spaces": (f"[TOOL_CALLS] [ {ITEM} ]\n", Found("", ONE)),
    "list of two": (
        f'[TOOL_CALLS][{ITEM}, {{"name": "get_time", "arguments": {{}}, "id": "abcdefghi"}}]',
        Found("", TWO),
    ),
    "text before": (f"I look.\n[TOOL_CALLS][{ITEM}]", Found("I look.", ONE)),
    "text after": (f"[TOOL_CALLS][{ITEM}] so", Found("so", ONE)),
    "named": (f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", Found("", ONE)),
    "named, two": (
        f"Hm [TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[ARGS]{{}}",
        Found("Hm", TWO),
    ),
    "with an id": (f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{PARIS}", Found("", ONE)),
    "without a mark": (f"[TOOL_CALLS]get_weather {PARIS}", Found("", ONE)),
    "list not closed": (f"[TOOL_CALLS][{ITEM}", Found("", ONE)),
}
PLAIN = [
    "No [TOOL] at [all], [TOOL_CA",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][]",
    "[TOOL_CALLS][",
    "[TOOL_CALLS] none of them\nat all",
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1,}}]',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b',
    '[TOOL_CALLS][{"arguments": {}}]',
    '[TOOL_CALLS]f[ARGS]{"a": tru}',
    '[TOOL_CALLS]f[ARGS]{"a": "b',
    "[TOOL_CALLS]f[ARGS]x{}",
    "[TOOL_CALLS]two words[ARGS]{}",
    "[TOOL_CALLS]f[AR",
    '[TOOL_CALLS]"f"',
]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("guaranteed", [False, True])
def test_what_is_found(name: str, guaranteed: bool) -> None:
    text, found = TEXTS[name]
    assert read_all_ways(lambda: MistralParser([], guaranteed), text) == found


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read_all_ways(lambda: MistralParser([]), text) == Found(text, [])


def test_ids_are_as_the_templates_want_them() -> None:
    for text in (TEXTS["list of two"][0], TEXTS["named, two"][0]):
        ids = [call.id for call in MistralParser([]).feed(text).calls]
        assert len(set(ids)) == 2 and all(re.fullmatch("[a-zA-Z0-9]{9}", i or "") for i in ids)
    assert MistralParser([]).feed(TEXTS["list of two"][0]).calls[1].id == "abcdefghi"
    assert MistralParser([]).feed(TEXTS["with an id"][0]).calls[0].id == "123456789"


@pytest.mark.parametrize("name", ["list", "named"])
def test_a_guaranteed_call_is_told_as_it_comes(name: str) -> None:
    text, _ = TEXTS[name]
    parser = MistralParser([], guaranteed=True)
    deltas = [call for char in text for call in parser.feed(char).calls]
    assert [delta.arguments for delta in deltas] == list(PARIS)
    cut = MistralParser([], guaranteed=True)
    found = read(cut, [text[: text.index("é")]])
    assert found == Found("", [("get_weather", '{"city": "Paris ]')]) and cut.cut
