"""tekken.json, against tiktoken's merging by its definition."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError, RequestError
from octavo.tokenization.pre_tokenizers import TEKKEN
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

WORDS = (
    " t|he| a|in|re|er| the|th| th|on|nd| and|ing|hel|lo|hell|hello| world|wor|ld|or|12|  |    |\n\n|aa|aaa|"
    "aaaa|é|世界|界|😀|don|'t|n't"
).split("|")
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
COUNT = 8


def ranks() -> list[bytes]:
    """Every byte, then tokens each of which two others before it make."""
    tokens = [bytes([b]) for b in range(256)]
    for word in WORDS:
        data = word.encode()
        for end in range(2, len(data) + 1):
            if data[:end] not in tokens:
                tokens.append(data[:end])
    # A token that no merge reaches: found only where a word is that token.
    tokens.append(b"unreached")
    return tokens


def content(**changes: Any) -> dict[str, Any]:
    """A tekken.json with three tokens more than its model has."""
    tokens = ranks()
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*tokens, b"beyond", b"beyon", b"yond"])
    ]
    config = {
        "pattern": TEKKEN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(tokens) + COUNT,
        "default_num_special_tokens": COUNT,
        "version": "v11",
    }
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIAL)]
    whole: dict[str, Any] = {"config": config, "vocab": vocab, "special_tokens": special}
    for key, value in changes.items():
        if key in config:
            config[key] = value
        else:
            whole[key] = value
    return whole


def write(path: Path, whole: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tekken.json").write_text(json.dumps(whole))
    return path


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("tekken"), content()))


def oracle(text: str) -> list[int]:
    """Words by the expression; in each, again and again, the adjacent pair of the lowest rank."""
    rank = {token: i for i, token in enumerate(ranks())}
    out: list[int] = []
    for word in regex.findall(TEKKEN, text):
        data = word.encode()
        parts = [data] if data in rank else [bytes([b]) for b in data]
        while True:
            pairs = [
                (rank.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            ]
            if not pairs or min(pairs)[0] == 1 << 30:
                break
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        out += [rank[part] + COUNT for part in parts]
    return out


# The two engines know different versions of Unicode.
ASSIGNED = st.text(st.characters(exclude_categories=("Cn", "Cs", "Co")), max_size=3)
TEXTS = st.lists(st.sampled_from([*WORDS, " ", "\n", "x", "A", "unreached", "beyond"]) | ASSIGNED, max_size=8)


@settings(max_examples=150, deadline=None)
@given(TEXTS.map("".join))
def test_merges_by_rank(tekken: Tokenizer, text: str) -> None:
    for name in SPECIAL:
        text = text.replace(name, "")
    ids = tekken.encode(text, add_special_tokens=False)
    assert ids == oracle(text)
    assert tekken.decode(ids) == text
    assert tekken.encode(text) == [1, *ids]


def test_ids_and_special_tokens(tekken: Tokenizer) -> None:
    assert tekken.vocab_size == len(ranks()) + COUNT
    assert [tekken.id_to_token(i) for i in range(COUNT)] == [
        *SPECIAL,
        "<SPECIAL_5>",
        "<SPECIAL_6>",
        "<SPECIAL_7>",
    ]
    assert tekken.all_special_ids == list(range(COUNT))
    assert (tekken.bos_token_id, tekken.eos_token_ids) == (1, (2,))
    assert tekken.encode("[INST]é[/INST]") == [1, 3, *oracle("é"), 4]
    assert tekken.token_to_bytes(COUNT + ranks().index(b"\xe4\xb8")) == b"\xe4\xb8"
    with pytest.raises(RequestError, match="no chat template"):
        tekken.apply_chat_template([{"role": "user", "content": "hi"}])


def test_companions_count(tmp_path: Path) -> None:
    folder = write(tmp_path, content())
    config = {"add_bos_token": False, "add_eos_token": True, "chat_template": "{{ bos_token }}[INST]x[/INST]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("é") == [*oracle("é"), 2]
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == [1, 3, *oracle("x"), 4]


def test_old_files_have_the_old_special_tokens(tmp_path: Path) -> None:
    whole = content(default_num_special_tokens=1000, default_vocab_size=len(ranks()) + 1000)
    del whole["special_tokens"]
    tokenizer = load_tokenizer(write(tmp_path, whole))
    assert [tokenizer.token_to_id(t) for t in ("<s>", "[INST]", "<pad>", "[SYSTEM_PROMPT]")] == [1, 3, 11, 17]
    assert tokenizer.encode("é") == [1, *(i - COUNT + 1000 for i in oracle("é"))]


def _vocab(**change: Any) -> list[dict[str, Any]]:
    vocab = content()["vocab"]
    vocab[300] = {**vocab[300], **change}
    return vocab


HOSTILE = {
    "absurd special count": content(default_num_special_tokens=10**12),
    "negative special count": content(default_num_special_tokens=-1),
    "special count of text": content(default_num_special_tokens="8"),
    "absurd size": content(default_vocab_size=10**12),
    "size of nothing": content(default_vocab_size=COUNT),
    "size of bool": content(default_vocab_size=True),
    "not base64": content(vocab=_vocab(token_bytes="@@@@")),
    "sloppy base64": content(vocab=_vocab(token_bytes="aGVs\nbG8=")),
    "no base64": content(vocab=_vocab(token_bytes=None)),
    "empty token": content(vocab=_vocab(token_bytes="")),
    "no bytes": content(vocab=_vocab(token_bytes="é")),
    "token twice": content(vocab=_vocab(token_bytes=base64.b64encode(b"a").decode())),
    "long token": content(vocab=_vocab(token_bytes=base64.b64encode(b"a" * 10**6).decode())),
    "wrong rank": content(vocab=_vocab(rank=7)),
    "vocab of numbers": content(vocab=[1] * 400),
    "no vocab": content(vocab=None),
    "vocab of another kind": content(vocab={"a": 1}),
    "missing bytes": content(vocab=content()["vocab"][1:]),
    "special twice": content(special_tokens=[{"rank": i, "token_str": "x"} for i in range(3)]),
    "special ranks": content(special_tokens=[{"rank": 9, "token_str": "x"}]),
    "special filler": content(special_tokens=[{"rank": 0, "token_str": "<SPECIAL_3>"}]),
    "special numbers": content(special_tokens=[{"rank": 0, "token_str": 7}]),
    "pattern": content(pattern="(unclosed"),
    "pattern of numbers": content(pattern=7),
    "no config": {"vocab": []},
    "config of another kind": {"config": [], "vocab": []},
    "list": [],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(write(tmp_path, HOSTILE[name]))
    assert "\n" not in str(caught.value) and "tekken.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"config": ', "[" * 100_000, '{"a": 1e999999}', "\udcff"])
def test_files_that_are_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match="tekken.json"):
        load_tokenizer(tmp_path)
