"""The settings of speculative decoding: how they are given, and what is refused by name."""

import json

import pytest

from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.speculative_config import METHODS, SpeculativeConfig, plain, read_speculative_config


def test_given_as_fields_as_json_as_a_file_and_beside(tmp_path):
    wanted = SpeculativeConfig("ngram", 3)
    fields = {"method": "ngram", "num_speculative_tokens": 3}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(fields))
    for given in (fields, json.dumps(fields), str(path)):
        assert EngineConfig(speculative_config=given).speculative == wanted
    assert (
        EngineConfig(speculative_config={"method": "ngram"}, num_speculative_tokens=3).speculative == wanted
    )
    assert EngineConfig().speculative is None
    assert read_speculative_config(plain(wanted), None, None) == wanted
    assert "ngram" in wanted.describe() and "3" in wanted.describe()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "ngramm"}, "did you mean ngram"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"method": "ngram", "num_speculative_tokens": "five"}, "num_speculative_tokens='five'"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 3}, "prompt_lookup_min=6"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "method='suffix' has no prompt_lookup_max"),
        ({"method": "ngram", "suffix_decoding_min_token_prob": 0.5}, "or take suffix"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob=1.5"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth=0"),
        ({"num_speculative_tokens": 3}, "names no method"),
        ({}, "names no method"),
        ("{not json", "not JSON"),
        ("[1]", "neither"),
        ("no/such/file.json", "no/such/file.json"),
    ],
)
def test_refused(given, words):
    with pytest.raises(ConfigError) as error:
        EngineConfig(speculative_config=given)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_suffix_drafts_as_many_tokens_as_it_looks_for():
    def tokens(**given) -> int:
        return EngineConfig(
            speculative_config={"method": "suffix", **given}
        ).speculative.num_speculative_tokens

    assert tokens() == 24
    assert tokens(suffix_decoding_max_tree_depth=10) == 10
    assert tokens(suffix_decoding_max_tree_depth=60) == 32
    assert tokens(num_speculative_tokens=5) == 5
    assert EngineConfig(speculative_config={"method": "suffix"}, num_speculative_tokens=6).speculative == (
        SpeculativeConfig("suffix", 6)
    )


def test_two_values_of_one_field():
    with pytest.raises(ConfigError, match="num_speculative_tokens=3, beside it 4"):
        EngineConfig(
            speculative_config={"method": "ngram", "num_speculative_tokens": 3}, num_speculative_tokens=4
        )


def test_the_fields_are_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help-speculative"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*METHODS, "num_speculative_tokens", "prompt_lookup_max"))
