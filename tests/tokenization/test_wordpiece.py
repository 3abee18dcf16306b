"""WordPiece: vocab.txt folders and GGUF's kind "bert", against Transformers' BertTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.tokenization.gguf_tokenizer import TokenType
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

from .conftest import write_gguf

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = (
    SPECIAL
    + "[unused1] the un ##aff ##able ##ing run runs ##s é café Café e ##e naive hello".split()
    + ", . ! ? ' t don do not n ##t".split()
    + "世 界 [ ] - ##- 1 12 ##2 a ##a Hello HELLO".split()
)
TEXTS = [
    "",
    "hello, world!",
    "unaffable running runs",
    "Café CAFÉ café e\u0301",
    "don't do not",
    "世界 hello世",
    "[MASK] the [CLS] [unused1]",
    "x" * 150 + " the",
    "a\u0000b\ufffd \t\n the\u00a0un",
    "Hello HELLO",
    "12-1 . ? '",
]


def _folder(path: Path, config: dict[str, Any] | None, lines: list[str] = VOCABULARY) -> Path:
    path.mkdir(exist_ok=True)
    (path / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


CONFIGS: list[dict[str, Any] | None] = [
    None,
    {"do_lower_case": True},
    {"do_lower_case": False},
    {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    {
        "do_lower_case": True,
        "add_bos_token": False,
        "cls_token": "the",
        "sep_token": {"__type": "AddedToken", "content": "un"},
    },
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_vocabulary_file_as_transformers(config: dict[str, Any] | None, tmp_path: Path) -> None:
    from transformers import BertTokenizer

    folder = _folder(tmp_path / "bert", config)
    ours, theirs = load_tokenizer(folder), BertTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs) == len(VOCABULARY)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special).input_ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(_folder(tmp_path_factory.mktemp("bert"), {"do_lower_case": True}))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(_gguf(tmp_path_factory.mktemp("gguf") / "bert.gguf"))


def _gguf(path: Path, bracketed: bool = False, **keys: Any) -> Path:
    """As llama.cpp converts: ▁ before the first token of a word, none elsewhere."""
    tokens = []
    for token in VOCABULARY:
        bare = token in SPECIAL or (bracketed and token == "[unused1]")
        tokens.append(token if bare else token[2:] if token.startswith("##") else "▁" + token)
    types = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in VOCABULARY]
    ids = dict(unknown_token_id=1, cls_token_id=2, seperator_token_id=3, padding_token_id=0, mask_token_id=4)
    return write_gguf(path, "bert", tokens, token_type=[int(t) for t in types], pre="bert", **{**ids, **keys})


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_equals_the_folder(text: str, bert: Tokenizer, gguf: Tokenizer) -> None:
    for special in (True, False):
        ids = gguf.encode(text, add_special_tokens=special)
        assert ids == bert.encode(text, add_special_tokens=special)
        assert gguf.decode(ids) == bert.decode(ids)
    assert gguf.special_tokens["cls_token"] == "[CLS]" and gguf.all_special_ids == [0, 1, 2, 3, 4]


def test_settings_of_a_gguf(tmp_path: Path) -> None:
    cased = load_tokenizer(_gguf(tmp_path / "cased.gguf", **{"tokenizer.ggml.normalizer.lowercase": False}))
    assert [cased.id_to_token(i) for i in cased.encode("Hello Café")] == ["[CLS]", "Hello", "Café", "[SEP]"]
    old = load_tokenizer(_gguf(tmp_path / "old.gguf", bracketed=True))
    assert old.token_to_id("[unused1]") == VOCABULARY.index("[unused1]")
    first = load_tokenizer(_gguf(tmp_path / "first.gguf", cls_token_id=6, add_bos_token=False))
    assert first.encode("hello")[0] == 6


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["un", "aff", "able", " ", "café", ".", "'", "世", "x"]) | st.text(max_size=3)
    ).map("".join)
)
def test_token_bytes_add_up(bert: Tokenizer, text: str) -> None:
    ids = bert.encode(text, add_special_tokens=False)
    whole = b"".join(map(bert.token_to_bytes, ids)).decode()
    assert bert.decode(ids, skip_special_tokens=False) == whole.removeprefix(" ")


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ([*SPECIAL, "a", "b", "a"], "'a' occurs twice"),
        (["a", "b"], "unk_token '\\[UNK\\]' is not in its vocabulary"),
        ([], "unk_token"),
        (["[UNK]", "[SEP]"], "cls_token"),
    ],
)
def test_vocabularies_that_cannot_be_used(lines: list[str], word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        load_tokenizer(_folder(tmp_path / "bad", None, lines))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config", [{"do_lower_case": [1]}, {"strip_accents": "x"}, {"tokenize_chinese_chars": {}}]
)
def test_settings_of_the_wrong_kind(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer_config.json"):
        load_tokenizer(_folder(tmp_path / "bad", config))


def test_a_vocabulary_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="vocab.txt"):
        load_tokenizer(tmp_path)
