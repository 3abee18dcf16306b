"""Chat templates of well-known models: every byte as Transformers' apply_chat_template renders it."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.tokenization.chat_template import render_chat

FOLDER = Path(__file__).parents[1] / "fixtures" / "chat_templates"
SOURCES = json.loads((FOLDER / "sources.json").read_text(encoding="utf-8"))
FILES = [entry["file"] for entry in SOURCES["templates"]]

USER = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = {"role": "system", "content": 'You are terse.\n<b> & "é" 😀'}
TURN = {"role": "assistant", "content": "I look it up.  "}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny. "}
MORE = {"role": "user", "content": "  And in Rome? "}
CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "unit": "c"}},
}
NOW = {"id": "abcdef124", "type": "function", "function": {"name": "now", "arguments": {}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CALLS_NULL = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CALLS_BARE = {"role": "assistant", "tool_calls": [CALL]}
TWO_CALLS = {"role": "assistant", "content": "Both.", "tool_calls": [CALL, NOW]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": '{"t": 21}'}
RESULT_NOW = {"role": "tool", "tool_call_id": "abcdef124", "name": "now", "content": "12:00"}
CHATS = {
    "single turn": [USER],
    "system": [SYSTEM, USER],
    "many turns": [SYSTEM, USER, TURN, MORE],
    "open answer": [USER, THOUGHT, MORE, TURN],
    "tool call": [USER, CALLS],
    "null content": [USER, CALLS_NULL, RESULT],
    "no content": [SYSTEM, USER, CALLS_BARE, RESULT],
    "tool result, then more": [SYSTEM, USER, CALLS, RESULT, THOUGHT, MORE],
    "two calls": [USER, TWO_CALLS, RESULT, RESULT_NOW],
}
CITY = {"type": "string", "description": "é <name> & more"}
UNIT = {"type": "string", "enum": ["c", "f"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a <city>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": CITY,
                    "unit": UNIT,
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "thinking": True},
    {"documents": [{"title": "T", "text": "doc é"}]},
    {"reasoning_effort": "high"},
]


def _tokenizer(template: str) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def test_sources_are_recorded_and_may_be_copied() -> None:
    assert len(FILES) >= 10 and sorted(FILES) == sorted(file.name for file in FOLDER.glob("*.jinja"))
    assert SOURCES["source_licence"] == "MIT"
    for entry in SOURCES["templates"]:
        assert entry["model_licence"] in ("Apache-2.0", "MIT")
        assert hashlib.sha256((FOLDER / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize("file", FILES)
def test_renders_as_transformers(file: str) -> None:
    template = (FOLDER / file).read_bytes().decode()
    reference = _tokenizer(template)
    special = {name: str(text) for name, text in reference.special_tokens_map.items()}
    rendered, refused, chats_rendered = 0, 0, set()
    for (name, chat), tools, mode, extra in itertools.product(
        CHATS.items(), (None, TOOLS), ("open", "closed", "continued"), EXTRAS
    ):
        if mode == "continued" and chat[-1] is not TURN:
            continue
        options = dict(
            add_generation_prompt=mode == "open",
            continue_final_message=mode == "continued",
            tools=tools,
            **extra,
        )
        where = (file, name, bool(tools), mode, extra)
        try:
            want = reference.apply_chat_template(copy.deepcopy(chat), tokenize=False, **options)
        except Exception:
            refused += 1
            if "tool_calls" not in template and name in ("null content", "no content"):
                # A template that knows no calls adds the content up; ours gets an empty text.
                texts = [message | {"content": message.get("content") or ""} for message in chat]
                want = reference.apply_chat_template(texts, tokenize=False, **options)
                assert render_chat(template, chat, special, **options) == want, where
                continue
            with pytest.raises(RequestError):
                render_chat(template, chat, special, **options)
            continue
        assert render_chat(template, chat, special, **options) == want, where
        rendered += 1
        chats_rendered.add(name)
    assert rendered > refused and {"single turn", "many turns", "open answer"} <= chats_rendered
