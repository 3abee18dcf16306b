"""Tokenizers out of Hugging Face folders, against Transformers reading the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError, RequestError
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "Hello world",
    " x  12 ",
    "<|im_start|>user\nhi<|im_end|>",
    "a<tool>b <extra> c",
    "世界 😀",
    "<s>hello</s>",
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


def _folder(path: Path, tokenizer: Tokenizer, config: dict[str, Any], **files: str) -> Path:
    path.mkdir()
    tokenizer._backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TokenizersBackend", **config})
    )
    for name, text in files.items():
        file = path / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return path


BYTE_LEVEL = {
    "bos_token": "<|im_start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
    "pad_token": None,
}
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "plain": ("small", {**BYTE_LEVEL, "chat_template": TEMPLATE}, {}),
    "flags do not count": (
        "small",
        {**BYTE_LEVEL, "add_bos_token": True, "add_eos_token": True, "chat_template": TEMPLATE},
        {},
    ),
    "template file": ("small", {**BYTE_LEVEL, "chat_template": "old"}, {"chat_template_jinja": TEMPLATE}),
    "new tokens": (
        "small",
        {
            **BYTE_LEVEL,
            "extra_special_tokens": ["<extra>"],
            "added_tokens_decoder": {
                "260": {"content": "<tool>", "special": False, "lstrip": True, "normalized": False},
                "261": {"content": "<extra>", "special": True, "normalized": False},
            },
        },
        {},
    ),
    "sentencepiece": ("spm", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, {}),
    "sentencepiece without bos": (
        "spm",
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
        {},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_reads_a_folder_as_transformers(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    source, config, files = CONFIGS[name]
    folder = _folder(tmp_path / "model", request.getfixturevalue(source), config, **files)
    ours, theirs = load_tokenizer(folder), TokenizersBackend.from_pretrained(folder)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special).input_ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special
            )
    if theirs.chat_template:
        ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(CHAT) == ids


def test_named_templates_and_template_json(tmp_path: Path, small: Tokenizer) -> None:
    files = {"additional_chat_templates__tool_use_jinja": "tools", "chat_template_jinja": "plain"}
    tokenizer = load_tokenizer(_folder(tmp_path / "a", small, BYTE_LEVEL, **files))
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=[{"type": "function"}]) == "tools"
    assert tokenizer.apply_chat_template(CHAT, chat_template="tool_use") == "tools"
    listed = [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}]
    tokenizer = load_tokenizer(_folder(tmp_path / "b", small, {**BYTE_LEVEL, "chat_template": listed}))
    assert tokenizer.apply_chat_template(CHAT, chat_template="rag") == "two"
    file = {"chat_template_json": json.dumps({"chat_template": "from json"})}
    assert load_tokenizer(_folder(tmp_path / "c", small, {}, **file)).apply_chat_template(CHAT) == "from json"


def test_an_override_replaces_the_models_own(tmp_path: Path, small: Tokenizer, spm: Tokenizer) -> None:
    other = _folder(tmp_path / "other", spm, {})
    own = _folder(tmp_path / "own", small, BYTE_LEVEL)
    for override in (other, other / "tokenizer.json"):
        assert load_tokenizer(own, str(override)).vocab_size == spm.vocab_size
    assert load_tokenizer(own).vocab_size == small.vocab_size


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path: Path, small: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend

    folder = _folder(tmp_path / "a", small, BYTE_LEVEL)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    text = "one two three four five six seven eight nine ten"
    assert load_tokenizer(folder).encode(text) == small.encode(text)


def test_errors_name_the_remedy(tmp_path: Path, small: Tokenizer) -> None:
    def error(path: Path) -> str:
        with pytest.raises(ModelError) as caught:
            load_tokenizer(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert "--tokenizer" in error(tmp_path / "empty")
    assert "neither" in error(tmp_path / "nowhere")
    broken = _folder(tmp_path / "broken", small, {})
    (broken / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json" in error(broken)
    (broken / "tokenizer_config.json").write_text("{}")
    (broken / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in error(broken)


def test_a_special_token_that_the_vocabulary_lacks_is_added(tmp_path: Path, small: Tokenizer) -> None:
    tokenizer = load_tokenizer(_folder(tmp_path / "a", small, {"bos_token": "<b>"}))
    assert tokenizer.bos_token_id == small.vocab_size == tokenizer.encode("<b>")[0]


@pytest.mark.parametrize("decoder", [None, "CTC"])
def test_decoders_that_are_not_bytes_are_refused(
    tmp_path: Path, small: Tokenizer, decoder: str | None
) -> None:
    folder = _folder(tmp_path / "a", small, {})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = decoder and {
        "type": decoder,
        "pad_token": "<pad>",
        "word_delimiter_token": "|",
        "cleanup": True,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=decoder or "no decoder"):
        load_tokenizer(folder)


@pytest.mark.parametrize("bad", ["\ud800", "ok \udfff", "\ud83d x"])
def test_lone_surrogates_are_refused(small: Tokenizer, bad: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        small.encode(bad)
    with pytest.raises(RequestError, match="surrogate"):
        small.encode_batch(["fine", bad])


def test_ids_out_of_range(small: Tokenizer) -> None:
    assert small.decode([small.vocab_size, 1 << 40]) == ""
    assert small.id_to_token(small.vocab_size) is None and small.id_to_token(-1) is None
    with pytest.raises(RequestError, match="-1"):
        small.decode([5, -1])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_any_text_or_one_error(small: Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert all(0 <= i < small.vocab_size for i in ids)


@pytest.mark.parametrize(
    "field",
    [
        "added_tokens_decoder",
        "extra_special_tokens",
        "additional_special_tokens",
        "chat_template",
        "eos_token",
    ],
)
def test_companions_with_values_of_the_wrong_kind(tmp_path, small, field):
    wrong = [-1, 1.5, "\ud800", [1], [{}], {"a": 1}, {"1": 5}, True]
    for number, value in enumerate(wrong):
        folder = _folder(tmp_path / str(number), small, {field: value})
        try:
            load_tokenizer(folder)
        except ModelError as error:
            assert str(folder) in str(error)


def test_companions_nested_too_deeply(tmp_path, small):
    folder = _folder(tmp_path / "deep", small, {}, special_tokens_map_json="[" * 100_000)
    with pytest.raises(ModelError, match="special_tokens_map"):
        load_tokenizer(folder)


def test_companions_of_too_many_values(tmp_path, small):
    """Each takes 100 bytes in memory, and 3 in the file."""
    folder = _folder(tmp_path / "many", small, {})
    (folder / "tokenizer_config.json").write_text('{"a": [' + "[]," * 4_000_000 + "[]]}")
    with pytest.raises(ModelError, match="tokenizer_config.json: not valid JSON .* values, more than"):
        load_tokenizer(folder)
