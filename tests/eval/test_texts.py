"""Files of texts."""

from __future__ import annotations

import hashlib
import json

import pytest

from octavo.errors import ConfigError
from octavo.eval.texts import read_texts


def test_a_plain_file_is_one_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo 天\n".encode())
    found = read_texts(str(path))
    assert found.texts == ["one\r\ntwo 天\n"]
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_json_lines_are_texts_of_their_own(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["one\ntwo", "line\u2028separator", "", "last"]
    lines = [json.dumps({"text": t, "id": i}, ensure_ascii=False) for i, t in enumerate(texts)]
    path.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n", encoding="utf-8")
    assert read_texts(str(path)).texts == ["one\ntwo", "line\u2028separator", "last"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"ab\xff", r"not UTF-8 \(byte 2\)"),
        ("a.jsonl", b'{"text": "a"}\n{"prompt": "b"}\n', "line 2"),
        ("a.jsonl", b'{"text": 3}', "line 1"),
        ("a.ndjson", b"plain", "line 1.*without the ending .jsonl or .ndjson"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.jsonl", b'{"text": ""}\n', "is empty"),
    ],
)
def test_wrong_files_are_told(tmp_path, name, content, told):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_texts(str(path))


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_texts(str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_texts(str(tmp_path))
