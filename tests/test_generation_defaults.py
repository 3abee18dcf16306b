"""`override_generation_config`: what may be said, in which forms, and what becomes of the file's values."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.config_options import add_config_arguments, config_from_args
from octavo.errors import ConfigError
from octavo.generation_defaults import overridden

VALUES = {"temperature": 0.5, "max_new_tokens": 7}


def from_words(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, EngineConfig, "engine")
    return config_from_args(parser.parse_args(words), EngineConfig)  # type: ignore[no-any-return]


def test_an_object_its_json_and_a_file_of_it_are_one(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps(VALUES))
    for given in (VALUES, json.dumps(VALUES), str(path)):
        assert EngineConfig(override_generation_config=given).override_generation_config == VALUES
        word = json.dumps(given) if isinstance(given, dict) else given
        assert from_words("--override-generation-config", word).override_generation_config == VALUES
    for nothing in ({}, "{}", None):
        assert EngineConfig(override_generation_config=nothing).override_generation_config is None


def test_values_are_as_they_will_be_used() -> None:
    given = {"top_k": -1, "temperature": 1, "max_new_tokens": 10**30, "min_p": None}
    found = EngineConfig(override_generation_config=given).override_generation_config
    assert found == {"top_k": 0, "temperature": 1.0, "max_new_tokens": (1 << 31) - 1, "min_p": None}
    assert given["top_k"] == -1  # the caller's own


def test_speculation_too_is_read_from_a_file_that_the_command_line_names(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"method": "ngram", "num_speculative_tokens": 3}')
    found = from_words("--speculative-config", str(path)).speculative
    assert found is not None and (found.method, found.num_speculative_tokens) == ("ngram", 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"temprature": 1}, "override_generation_config has no field temprature: did you mean temperature?"),
        ({"max_tokens": 1}, "has no field max_tokens: did you mean max_new_tokens?"),
        ({5: 1}, "override_generation_config has no field 5: give temperature"),
        ({"do_sample": False}, "has no field do_sample: give temperature, top_p, top_k, min_p"),
        ({"top_p": 2}, "override_generation_config: top_p=2 is not valid: give a number above 0"),
        ({"max_new_tokens": 0}, "override_generation_config: max_new_tokens=0 is not valid"),
        ({"temperature": True}, "temperature=True is not valid"),
        ("[1]", "'[1]' is neither a JSON object nor a readable file"),
        ('{"top_k": ', "is not JSON"),
        ("no/such/file.json", "'no/such/file.json' is neither a JSON object nor a readable file"),
    ],
)
def test_what_cannot_be_said_is_refused_in_one_line(given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(override_generation_config=given)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_values_replace_those_of_the_file_and_null_takes_them_away() -> None:
    stated = {"temperature": 0.7, "top_k": 20, "max_tokens": 99}
    assert overridden(stated, None) == stated
    override = {"temperature": 0.0, "top_k": None, "max_new_tokens": 5, "min_p": 0.1}
    assert overridden(stated, override) == {"temperature": 0.0, "max_tokens": 5, "min_p": 0.1}
    assert overridden({}, {"top_p": 0.5}) == {"top_p": 0.5}
