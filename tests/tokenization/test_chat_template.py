"""Chat templates: as Transformers renders them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, RequestError
from octavo.tokenization.chat_template import flatten_messages, load_chat_template, render_chat
from octavo.tokenization.tokenizer import Tokenizer

USER = {"role": "user", "content": "What is 2 + 2?"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief. <|im_end|> & \"quoted\" 'é' 😀"}, USER],
    [USER, {"role": "assistant", "content": "  It is "}],
    [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "\n and 3 + 3?\n"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": "é<&>"}}}]
CHATML = (
    "{%- for m in messages %}\n    {%- if loop.first and m.role != 'system' %}\n"
    "{{ '<|im_start|>system\\nDefault<|im_end|>\\n' }}\n    {%- endif %}\n"
    "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>' + '\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RICH = (
    "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'skip' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}\n  "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}\n{{ ns.n }}: {{ m.content }}{% endif %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{{ tools[0] | tojson }}{% endif %}"
    "{{ extra | default('none') }}{% if documents is none %} no documents{% endif %}"
)


def _reference(template: str, chat: list[dict[str, Any]], **kwargs: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template(conversations=[chat], chat_template=template, **kwargs)[0][0]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", ["own", "chatml", "rich"])
def test_renders_as_transformers(smollm2: Tokenizer, chat: list[dict[str, Any]], template: str) -> None:
    text = {"own": smollm2.get_chat_template(), "chatml": CHATML, "rich": RICH}[template]
    special = smollm2.special_tokens
    for options in ({}, {"tools": TOOLS}, {"extra": "given"}, {"bos_token": "<b>"}):
        for generate in (True, False):
            ours = smollm2.apply_chat_template(
                chat, add_generation_prompt=generate, chat_template=text, **options
            )
            assert ours == _reference(text, chat, add_generation_prompt=generate, **{**special, **options})
    ours = smollm2.apply_chat_template(
        chat, add_generation_prompt=False, continue_final_message=True, chat_template=text
    )
    if template != "own" or not chat[-1]["content"].endswith(" "):
        assert ours.rstrip() == _reference(text, chat, continue_final_message=True, **special).rstrip()


def test_default_models_template_has_its_tokens_once(smollm2: Tokenizer) -> None:
    ids = smollm2.encode_chat([USER])
    text = smollm2.apply_chat_template([USER])
    assert ids == smollm2.encode(text, add_special_tokens=False)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert text.endswith("<|im_start|>assistant\n") and ids.count(1) == text.count("<|im_start|>") == 3


def test_the_final_message_stays_open(smollm2: Tokenizer) -> None:
    chat = [USER, {"role": "assistant", "content": "It is "}]
    text = smollm2.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is ")
    assert chat[-1]["content"] == "It is "


def test_parts_and_missing_contents() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    flat = flatten_messages([{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    assert [m["content"] for m in flat] == ["one\ntwo", ""]
    loops = "{% for m in messages %}{% for p in m['content'] %}<{{ p['text'] }}>{% endfor %}{% endfor %}"
    assert render_chat(loops, [{"role": "user", "content": parts}], {}) == "<one><two>"
    assert render_chat(loops, [{"role": "user", "content": "one"}], {}) == "<one>"
    asks = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}x{% endfor %}{% endif %}{% endfor %}"
    )
    assert render_chat(asks, [{"role": "user", "content": parts}], {}) == "one\ntwo"


def test_a_developer_is_the_system_to_templates_that_know_none() -> None:
    chat = [{"role": "developer", "content": "Be brief."}, USER]
    system = [{"role": "system", "content": "Be brief."}, USER]
    assert render_chat(CHATML, chat, {}) == render_chat(CHATML, system, {})
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D:{{ m.content }}{% endif %}{% endfor %}"
    assert render_chat(knows, chat, {}) == "D:Be brief."
    assert chat[0]["role"] == "developer"  # the caller's own


def test_a_template_that_knows_no_calls_gets_texts() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render_chat("{{ messages[1].content + '.' }}", chat, {}) == "."
    knows = "{{ messages[1].content is none and messages[1].tool_calls | length == 1 }}"
    assert render_chat(knows, chat, {}) == "True"


def test_tool_calls_come_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert render_chat(template, chat, {}) == '{"a": [1, "é"]}'
    assert call["function"]["arguments"] == '{"a": [1, "é"]}'
    for arguments in ("{", "[" * 100_000):  # the second is nested more deeply than Python reads
        call["function"]["arguments"] = arguments
        with pytest.raises(RequestError, match="not JSON"):
            render_chat(template, chat, {})


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "empty"),
        ("hi", "empty"),
        (["hi"], r"messages\[0\]"),
        ([{"content": "hi"}], "role"),
        ([{"role": "user", "content": 5}], "5"),
        (
            [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "image_url",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input_audio"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": [7]}], "7"),
    ],
)
def test_bad_messages_are_refused_by_name(messages: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        render_chat(CHATML, messages, {})
    assert caught.value.param == "messages" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('only\nusers') }}", "only users"),
        ("{{ messages[0].content.nothing.at_all }}", "refused"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for x in %}", "line 1"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "refused"),
    ],
)
def test_templates_that_fail_refuse_the_request(template: str, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        render_chat(template, [USER], {})
    assert "\n" not in str(caught.value)


def test_the_date_is_todays() -> None:
    from datetime import datetime

    assert render_chat("{{ strftime_now('%Y') }}", [USER], {}) == datetime.now().strftime("%Y")


def test_contradictions_and_absent_templates(smollm2: Tokenizer, spm: Tokenizer) -> None:
    with pytest.raises(RequestError, match="exclude"):
        smollm2.apply_chat_template([USER], continue_final_message=True)
    with pytest.raises(RequestError, match="continue"):
        smollm2.apply_chat_template(
            [USER], add_generation_prompt=False, continue_final_message=True, chat_template="nothing"
        )
    with pytest.raises(RequestError, match="--chat-template"):
        spm.apply_chat_template([USER])
    assert not spm.has_chat_template and smollm2.has_chat_template
    assert spm.apply_chat_template([USER], chat_template=CHATML).startswith("<|im_start|>system\nDefault")


def test_template_files(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }} é", encoding="utf-8")
    assert load_chat_template(str(file)) == load_chat_template("{{ messages[0].content }} é")
    with pytest.raises(ConfigError, match="nowhere"):
        load_chat_template(str(tmp_path / "nowhere.jinja"))
    with pytest.raises(ConfigError, match="line 1"):
        load_chat_template("{{ x")
