"""Settings: the words of vLLM's users, and what is said to those who ask for what there isn't yet."""

from __future__ import annotations

import argparse

import pytest

from octavo.config import EngineConfig
from octavo.config_options import add_config_arguments, config_from_args
from octavo.errors import ConfigError

WORDS = [
    ("dtype", "half", "float16"),
    ("dtype", "float", "float32"),
    ("generation_config", "vllm", "none"),
    ("quantization", "gptq_marlin", "gptq"),
    ("quantization", "awq_marlin", "awq"),
]


@pytest.mark.parametrize(("name", "word", "meant"), WORDS)
def test_vllms_words_are_taken_from_python_and_the_command_line(name, word, meant):
    assert getattr(EngineConfig(**{name: word}), name) == meant
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, EngineConfig, "engine")
    args = parser.parse_args([f"--{name.replace('_', '-')}", word])
    assert getattr(config_from_args(args, EngineConfig), name) == meant


def test_a_word_near_a_choice_is_still_refused():
    with pytest.raises(ConfigError, match=r"^dtype='halff' is not known: choose auto, float32"):
        EngineConfig(dtype="halff")


@pytest.mark.parametrize("name", ["seed", "kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_numbers_that_no_message_holds_are_refused(name):
    with pytest.raises(
        ConfigError, match=f"^{name}=1000000000000000000000000000000 is out of range: give an"
    ):
        EngineConfig(**{name: 10**30})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("enable_lora", True, "leave it out"),
        ("cpu_offload_gb", 4, "leave it out"),
        ("data_parallel_size", 2, "this version runs 1"),
    ],
)
def test_what_is_not_there_yet_is_refused_with_what_to_do(name, value, remedy):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert str(caught.value) == f"{name}={value} is not supported by this version: {remedy}"
