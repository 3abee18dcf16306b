"""The tiny models keep what their module promises; otherwise parity tests would prove little."""

from __future__ import annotations

import json

import pytest

from tests import tiny


@pytest.mark.slow
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_greedy_output_is_telling(variant: str) -> None:
    assert tiny.is_good(tiny.reference(variant))


def test_greedy_output_is_telling_for_the_plainest() -> None:
    assert tiny.is_good(tiny.reference("llama"))


def test_folder_is_complete() -> None:
    folder = tiny.checkpoint("llama")
    names = {p.name for p in folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize("text", ["hello\n", "日本語 🙂👍🏽", "\x00\x7f tab\t", "Zażółć 123"])
def test_tokenizer_is_reversible_and_within_the_vocabulary(text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert ids and max(ids) < tiny.VOCAB_SIZE
