"""`hf_overrides` against a copy of the model whose config.json was edited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.loader import load_model_config
from octavo.models.locate import configured_model
from octavo.models.pull import pull_default
from tests import tiny

SETTINGS: dict[str, Any] = dict(dtype="float32", device="cpu", num_threads=1, kv_cache_memory_bytes=4 << 20)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def edited(folder: Path, **values: Any) -> str:
    shutil.copytree(tiny.checkpoint("llama"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return str(folder)


def tokens(**settings: Any) -> tuple[list[int], bytes]:
    with LLM(**SETTINGS, **settings) as llm:
        [output] = llm.generate([{"prompt_token_ids": tiny.PROMPTS[0]}], PARAMS, use_tqdm=False)
        return output.outputs[0].token_ids, llm._client.facts.cache_root


def test_tokens_and_keys_are_those_of_an_edited_copy(tmp_path):
    model = str(tiny.checkpoint("llama"))
    plain = tokens(model=model)
    assert plain[0] == tiny.greedy("llama", 0)[:24]
    values = {"rope_theta": 50.0, "rms_norm_eps": 0.5}
    over = tokens(model=model, hf_overrides=values)
    assert over == tokens(model=edited(tmp_path / "m", **values))
    assert over[0] != plain[0] and over[1] != plain[1]
    assert tokens(model=model, rope_theta=50.0, hf_overrides={"rms_norm_eps": 0.5}) == over


def test_objects_are_merged_and_wrong_values_are_told(tmp_path):
    raw = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    folder = edited(tmp_path / "m", **raw)
    config = EngineConfig(model=folder, hf_overrides={"rope_scaling": {"factor": 4.0}})
    other = edited(tmp_path / "n", rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert (
        load_model_config(configured_model(config)).rope
        == load_model_config(configured_model(EngineConfig(model=other))).rope
    )
    with pytest.raises(ModelError, match="num_attention_heads"):
        tokens(model=folder, hf_overrides={"num_attention_heads": -1})
    with pytest.raises(ConfigError, match="hf_overrides is for a config.json"):
        tokens(model=str(pull_default(progress=False)), hf_overrides={"a": 1})
