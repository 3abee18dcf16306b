"""The settings of speculative decoding: how they are given, and what is refused by name."""

import json
import logging
from dataclasses import fields

import pytest

from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.speculative_config import METHODS, SpeculativeConfig, plain, read_speculative_config
from octavo.vllm_names import DRAFTS


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
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max=0 is out of range"),
        ({"method": "ngram", "prompt_lookup_min": 99}, "prompt_lookup_min=99 is out of range"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "method='suffix' has no prompt_lookup_max"),
        ({"method": "ngram", "suffix_decoding_min_token_prob": 0.5}, "or take suffix"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob=1.5"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth=0"),
        ({"method": "pard"}, "needs a model"),
        ({"method": "eagle3", "model": "x", "max_model_len": 100}, "method='eagle3' has no max_model_len"),
        ({"method": "draft_model", "model": "x", "max_model_len": 0}, "max_model_len=0 is out of range"),
        ({"method": "eagle3", "model": "x", "parallel_drafting": True}, "has no parallel_drafting"),
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


@pytest.mark.parametrize(
    "given",
    [
        dict(synthetic_acceptance=[0.8, 0.5, 0]),
        dict(synthetic_acceptance="0.8,0.5,0"),
        dict(rejection_sample_method="synthetic", synthetic_acceptance=(0.8, 0.5, 0.0)),
        dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.8, 0.4, 0.0]),
    ],
)
def test_synthetic_acceptance_has_one_meaning_however_it_is_told(given):
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    config = EngineConfig(speculative_config={"method": "suffix", **given})
    settled = config.speculative
    assert settled.num_speculative_tokens == 3
    assert config.synthetic_acceptance == pytest.approx([0.8, 0.5, 0.0])
    assert settled.rejection_sample_method == "synthetic" and settled.synthetic_acceptance_rates is None
    assert "SYNTHETIC acceptance 0.8,0.5,0" in settled.describe()
    assert read_speculative_config(plain(settled), None, None) == settled
    beside = EngineConfig(
        speculative_config={"method": "suffix"}, speculative_synthetic_acceptance="0.8,0.5,0"
    )
    assert beside.synthetic_acceptance == config.synthetic_acceptance


@pytest.mark.parametrize(
    ("length", "rates"), [(1, [0, 0, 0]), (2.5, [1, 0.5, 0]), (4, [1, 1, 1]), (3.25, [1, 1, 0.25])]
)
def test_a_mean_length_is_met(length, rates):
    given = dict(num_speculative_tokens=3, rejection_sample_method="synthetic")
    config = EngineConfig(
        speculative_config={"method": "ngram", **given, "synthetic_acceptance_length": length}
    )
    assert config.synthetic_acceptance == pytest.approx(rates)


def test_acceptance_is_the_model_s_where_nothing_is_said():
    for config in (EngineConfig(), EngineConfig(speculative_config={"method": "ngram"})):
        assert config.synthetic_acceptance is None
    described = EngineConfig(
        speculative_config={"method": "ngram", "rejection_sample_method": "strict"}
    ).speculative.describe()
    assert "SYNTHETIC" not in described


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(synthetic_acceptance="0.8,often"), "'often' is no number"),
        (dict(synthetic_acceptance="1.2"), "1.2 is no probability"),
        (dict(synthetic_acceptance=[0.5, float("nan")]), "nan is no probability"),
        (dict(synthetic_acceptance=[]), "is not valid"),
        (dict(synthetic_acceptance=[True]), "is not valid"),
        (dict(synthetic_acceptance="0.8,0.6", num_speculative_tokens=3), "it has 2 rates"),
        (dict(synthetic_acceptance=[0.5] * 40), "num_speculative_tokens=40"),
        (dict(synthetic_acceptance_rates=[0.8]), "is for rejection_sample_method='synthetic'"),
        (dict(synthetic_acceptance_length=2), "is for rejection_sample_method='synthetic'"),
        (dict(rejection_sample_method="synthetic"), "needs rates"),
        (
            dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.5, 0.6]),
            "0.6 is above 0.5",
        ),
        (
            dict(rejection_sample_method="synthetic", synthetic_acceptance_length=7),
            "5 yield 6 tokens at most",
        ),
        (dict(synthetic_acceptance="0.5", synthetic_acceptance_length=2), "two names of one setting"),
        (dict(rejection_sample_method="probabilistic"), "rejection_sample_method='probabilistic'"),
    ],
)
def test_synthetic_acceptance_is_refused_by_name(given, words):
    with pytest.raises(ConfigError) as error:
        EngineConfig(speculative_config={"method": "ngram", **given})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_synthetic_acceptance_without_a_method_is_refused():
    with pytest.raises(ConfigError, match="nothing drafts: give speculative_config with a method"):
        EngineConfig(speculative_synthetic_acceptance="0.8")


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


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (2, 5)),
        (dict(prompt_lookup_max=1), (1, 1)),
        (dict(prompt_lookup_max=4), (2, 4)),
        (dict(prompt_lookup_min=8), (8, 8)),
        (dict(prompt_lookup_min=3), (3, 5)),
        (dict(prompt_lookup_min=3, prompt_lookup_max=9), (3, 9)),
    ],
)
def test_one_bound_of_what_is_looked_up(given, bounds):
    config = EngineConfig(speculative_config={"method": "ngram", **given}).speculative
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == bounds


def test_parallel_drafts_under_both_names():
    wanted = SpeculativeConfig("pard", 12, model="x")
    given = {"method": "draft_model", "model": "x", "num_speculative_tokens": 12, "parallel_drafting": True}
    assert EngineConfig(speculative_config=given).speculative == wanted
    assert EngineConfig(speculative_config={**given, "method": "pard"}).speculative == wanted
    assert read_speculative_config(plain(wanted), None, None) == wanted
    assert EngineConfig(speculative_config={**given, "parallel_drafting": False}).speculative.method == (
        "draft_model"
    )


# Of vLLM's SpeculativeConfig (0.6 to 0.14), but for what the engine itself fills in.
VLLM_FIELDS = """
num_speculative_tokens model method draft_tensor_parallel_size quantization max_model_len revision
code_revision disable_by_batch_size disable_logprobs disable_mqa_scorer disable_padded_drafter_batch
prompt_lookup_max prompt_lookup_min speculative_token_tree enforce_eager tensor_parallel_size moe_backend
attention_backend kv_cache_dtype use_heterogeneous_vocab parallel_drafting suffix_decoding_max_tree_depth
suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
draft_load_config rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
draft_sample_method acceptance_method posterior_threshold posterior_alpha disable_log_stats
use_local_argmax_reduction num_speculative_tokens_per_batch_size
""".split()


def test_every_field_of_vllm_is_known():
    ours = {spec.name for spec in fields(SpeculativeConfig)}
    assert not ours & DRAFTS.keys()
    assert [name for name in VLLM_FIELDS if name not in ours | DRAFTS.keys()] == []


def test_fields_of_vllm_that_change_nothing_are_taken(caplog):
    given = {"method": "eagle3", "model": "x", "num_speculative_tokens": 3}
    with caplog.at_level(logging.WARNING):
        taken = EngineConfig(
            speculative_config={**given, "draft_tensor_parallel_size": 1, "kv_cache_dtype": "auto"}
        )
    assert taken.speculative == SpeculativeConfig("eagle3", 3, model="x")
    assert "draft_tensor_parallel_size=1 changes nothing here" in caplog.text
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab=True is not supported: a draft must have"):
        EngineConfig(speculative_config={**given, "use_heterogeneous_vocab": True})


def test_a_model_called_so_is_a_head():
    for model, method in (
        ("org/EAGLE3-LLaMA3.1-8B", "eagle3"), ("eagle3/llama", "draft_model"), ("org/small", "draft_model")
    ):  # fmt: skip
        assert EngineConfig(speculative_model=model).speculative.method == method
        assert EngineConfig(speculative_config={"model": model}).speculative.method == method
    given = {"model": "org/eagle3", "method": "draft_model"}
    assert EngineConfig(speculative_config=given).speculative.method == "draft_model"


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
