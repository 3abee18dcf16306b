"""What models' own chat templates write of a past call is what the parsers read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.server.tools.registry import TOOL_PARSERS
from octavo.tokenization.chat_template import render_chat
from tests.server.tools.reading import read_all_ways

FOLDER = Path(__file__).parents[2] / "fixtures" / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CITY = {"city": 'Malmö "x" </tool_call> 🙂', "days": [1, {"deep": None}]}
CALLS = [
    {
        "id": "abcdef123",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps(CITY)},
    },
    {"id": "abcdef124", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("get_weather", "get_time")
]
ENDS = ("<|im_end|>\n", "</s>", "<|im_end|>")
CASES = [
    ("hermes", "Qwen-Qwen2.5-7B-Instruct.jinja", "I look."),
    ("hermes", "Qwen-Qwen2.5-7B-Instruct.jinja", ""),
    ("hermes", "Qwen-Qwen3-0.6B.jinja", "I look."),
    ("mistral", "mistralai-Mistral-Nemo-Instruct-2407.jinja", ""),
    ("mistral", "Mistral-Small-3.2-24B-Instruct-2506.jinja", ""),
]


@pytest.mark.parametrize(("parser", "file", "content"), CASES)
def test_a_past_call_is_read_as_it_was(parser: str, file: str, content: str) -> None:
    template = (FOLDER / file).read_text(encoding="utf-8")
    question = [{"role": "user", "content": "Weather?"}]
    answer = {"role": "assistant", "content": content, "tool_calls": CALLS}
    before = render_chat(template, question, SPECIAL, add_generation_prompt=True, tools=TOOLS)
    after = render_chat(template, [*question, answer], SPECIAL, add_generation_prompt=False, tools=TOOLS)
    assert after.startswith(before)
    text = after[len(before) :]
    for end in ENDS:
        text = text.removesuffix(end)
    text = text.removeprefix("<think>\n\n</think>\n\n")  # Qwen 3's; the reasoning parser's affair
    assert "get_weather" in text and "get_time" in text
    found = read_all_ways(lambda: TOOL_PARSERS[parser](["get_weather", "get_time"]), text)
    assert found.content == content
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
        ("get_weather", CITY),
        ("get_time", {}),
    ]
