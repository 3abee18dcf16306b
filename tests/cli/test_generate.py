"""`octavo generate` through the real engine, with a tiny model."""

from __future__ import annotations

import io
import json
import sys

import pytest

from octavo.cli.main import main
from tests import tiny

SETTINGS = ["--max-model-len", "128", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", "4MiB"]


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny.checkpoint("llama"))


def generate(model: str, *args: str) -> int:
    return main(["generate", "--model", model, *SETTINGS, "--temperature", "0", "--max-tokens", "12", *args])


def feed(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_stream_json_and_standard_input_agree(model, capsys, monkeypatch):
    assert generate(model, "good morning") == 0
    streamed = capsys.readouterr().out
    feed(monkeypatch, b"good morning\r\n")
    assert generate(model, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    choice = result["outputs"][0]
    assert streamed == choice["text"] + "\n"
    assert len(choice["token_ids"]) <= 12
    assert choice["finish_reason"] in ("length", "stop")
    assert "<|user|>" in result["prompt"]  # the chat template is the default


def test_raw_continues_the_prompt_as_it_stands(model, capsys):
    assert generate(model, "--json", "--raw", "good morning") == 0
    raw = json.loads(capsys.readouterr().out)
    assert raw["prompt"] == "good morning"
    assert generate(model, "--json", "--system", "be brief", "good morning") == 0
    assert "be brief" in json.loads(capsys.readouterr().out)["prompt"]


def test_choices_are_numbered(model, capsys):
    assert generate(model, "--temperature", "1", "--seed", "7", "--n", "2", "hi") == 0
    out = capsys.readouterr().out
    assert out.startswith("[0] ")
    assert "\n[1] " in out


@pytest.mark.parametrize(
    ("args", "stdin", "told"),
    [
        (["--temperature", "nan", "hi"], b"", "temperature=nan"),
        (["--block-size", "16", "--quantization", "fp9", "hi"], b"", "'fp9'"),
        (["--structured-outputs", "{}", "hi"], b"", "structured_outputs"),
        (["--raw", "--system", "x", "hi"], b"", "--system"),
        (["-"], b"", "the prompt is empty: standard input holds nothing"),
        ([""], b"", "the prompt is empty: give at least one character"),
        (["-"], b"\xff\xfe", "not UTF-8"),
        (["--logit-bias", "{oops", "hi"], b"", "is not JSON"),
        (["--max-tokens", "many", "hi"], b"", "many"),
    ],
)
def test_bad_input_is_told_before_a_model_is_loaded(args, stdin, told, capsys, monkeypatch):
    feed(monkeypatch, stdin)
    try:
        code = main(["generate", "--model", "no-such-model", *args])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert told in error
    assert error.count("\n") == 1


def test_an_unknown_model_fails_with_1(capsys):
    assert main(["generate", "--model", "no-such-model", "hi"]) == 1
    error = capsys.readouterr().err
    assert "no-such-model" in error
    assert error.count("\n") == 1


def test_a_terminal_without_prompt_is_not_waited_for(capsys, monkeypatch):
    feed(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["generate"]) == 2
    assert "no prompt" in capsys.readouterr().err
