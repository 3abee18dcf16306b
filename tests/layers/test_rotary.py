"""Rope scalings against Transformers' own functions, and the table's independence of length."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import ConfigError, ModelError
from octavo.layers.rotary import RotaryEmbedding, rope_frequencies, rope_variant
from octavo.models.config import RopeConfig
from octavo.models.hf_config import model_config_from_dict
from tests.layers.building import build_context

THETA = 500000.0
DIM = 64
FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(DIM // 2)],
    "long_factor": [1.0 + 0.5 * i for i in range(DIM // 2)],
}
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
     "mscale_all_dim": 0.707, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "truncate": False},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8192, **FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, **FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, "attention_factor": 1.1, **FACTORS},
]  # fmt: skip


def _configs(scaling: dict) -> tuple[LlamaConfig, RopeConfig]:
    hf = LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": THETA, **scaling},
        architectures=["LlamaForCausalLM"],
    )
    return hf, model_config_from_dict(hf.to_dict()).rope


@pytest.mark.parametrize("max_model_len", [512, 8192, 20000])
@pytest.mark.parametrize(
    "scaling", SCALINGS, ids=lambda s: "-".join(str(s.get(k, "")) for k in ("rope_type", "factor"))
)
def test_equals_transformers(scaling: dict, max_model_len: int):
    hf, rope = _configs(scaling)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf, "cpu", seq_len=max_model_len)
    ours, our_factor = rope_frequencies(rope, 8192, max_model_len)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(their_factor, rel=1e-12)


def test_default():
    ours, factor = rope_frequencies(RopeConfig(10000.0, 8), 128, 128)
    torch.testing.assert_close(ours, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert factor == 1.0


def test_variant_changes_just_where_frequencies_do():
    """`rope_variant` enters the block keys: equal variants must mean equal frequencies, and the reverse."""
    for scaling in SCALINGS:
        rope = _configs(scaling)[1]
        lengths = (512, 4096, 9000, 20000)
        tables = {n: tuple(rope_frequencies(rope, 8192, n)[0].tolist()) for n in lengths}
        variants = {n: rope_variant(rope, 8192, n) for n in lengths}
        for a in lengths:
            for b in lengths:
                assert (variants[a] == variants[b]) == (tables[a] == tables[b]), (scaling, a, b)


def test_bad_config_is_one_line():
    with pytest.raises(ModelError, match="rope kind 'spiral'.*use one of"):
        rope_frequencies(RopeConfig(1e4, 8, "spiral"), 128, 128)
    with pytest.raises(ModelError, match="'llama3' lacks 'factor'"):
        rope_frequencies(RopeConfig(1e4, 8, "llama3"), 128, 128)
    params = {"short_factor": [1.0], "long_factor": [1.0], "original_max_position_embeddings": 64}
    with pytest.raises(ModelError, match="short_factor has 1 numbers, not 4"):
        rope_frequencies(RopeConfig(1e4, 8, "longrope", params), 64, 64)


@pytest.mark.parametrize("theta, params", [
    (0.0, {"factor": 2.0}), (float("nan"), {"factor": 2.0}), (1e4, {"factor": "x"}),
    (1e4, {"factor": [2.0]}), (1e4, {"factor": float("inf")}), (1.0, {"factor": 2.0}),
    (1e4, {"factor": 2.0, "attention_factor": float("nan")}),
])  # fmt: skip
def test_numbers_without_finite_frequencies_are_refused(theta, params):
    params = {"original_max_position_embeddings": 64} | params
    with pytest.raises(ModelError, match="rope kind 'yarn'"):
        rope_frequencies(RopeConfig(theta, 8, "yarn", params), 128, 128)


def test_table_that_memory_cannot_hold():
    layer = RotaryEmbedding(RopeConfig(1e4, 128), 1 << 30)
    build = build_context(max_model_len=1 << 42)
    with pytest.raises(ConfigError, match="max_model_len=4398046511104"):
        layer.create_weights(build, "rope")
