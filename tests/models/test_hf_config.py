"""config.json and generation_config.json, new and old, against what Transformers makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from octavo.errors import ModelError
from octavo.models.config import RopeConfig
from octavo.models.hf_config import (
    generation_config_from_folder,
    model_config_from_dict,
    model_config_from_folder,
)
from octavo.models.loading import targets_of
from octavo.models.targets import missing
from octavo.models.transformers_config import model_config_from_raw
from tests import tiny

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


def config_of(**changes: Any) -> Any:
    return model_config_from_dict({**LLAMA, **changes})


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_reads_what_transformers_writes(variant: str) -> None:
    config = model_config_from_folder(tiny.checkpoint(variant))
    model = tiny.reference(variant)
    theirs = model.config
    assert config.num_layers == theirs.num_hidden_layers
    assert (config.num_heads, config.num_kv_heads) == (4, theirs.num_key_value_heads)
    if config.latent is None:
        assert config.head_dim == model.model.layers[0].self_attn.head_dim
    assert config.dtype == "float32"
    assert (config.bos_token_id, config.eos_token_ids) == (tiny.BOS, (tiny.EOS,))
    ropes = theirs.rope_parameters
    if "full_attention" in ropes:
        assert config.local_rope.kind == "default"
        assert config.local_rope.theta == ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    assert config.rope.kind == ropes["rope_type"]
    assert config.rope.theta == ropes["rope_theta"]
    for key, value in config.rope.params.items():
        if key in ropes:
            assert value == ropes[key]
    state = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    targets = targets_of(config)
    assert not missing(state, targets)
    assert {n: targets[n].shape for n in state} == state
    q_norms = ("q_norm.weight", "q_layernorm.norms.0.weight")
    assert config.qk_norm == any(f"model.layers.0.self_attn.{name}" in state for name in q_norms)


# Architectures whose config class fills in what config.json leaves out, with sizes that it may not.
SIZES = {
    "vocab_size": 384, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 32,
}  # fmt: skip
CLASSES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Phi3ForCausalLM": transformers.Phi3Config,
    "Gemma2ForCausalLM": transformers.Gemma2Config,
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
    "GraniteForCausalLM": transformers.GraniteConfig,
    "Olmo2ForCausalLM": transformers.Olmo2Config,
    "Olmo3ForCausalLM": transformers.Olmo3Config,
    "StableLmForCausalLM": transformers.StableLmConfig,
}


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("sizes", [SIZES, {}], ids=["sizes", "nothing"])
def test_absent_keys_are_filled_in_as_transformers_does(architecture: str, sizes: dict[str, Any]) -> None:
    if not sizes and architecture != "Gemma3ForCausalLM":
        with pytest.raises(ModelError, match="num_attention_heads=None"):
            model_config_from_dict({"architectures": [architecture]})
        return
    ours = model_config_from_dict({"architectures": [architecture], **sizes})
    filled = CLASSES[architecture](**sizes).to_dict()
    theirs = model_config_from_dict({**filled, "architectures": [architecture]})
    same = {"extra": {}, "bos_token_id": None, "eos_token_ids": ()}
    assert replace(ours, **same) == replace(theirs, **same)


def test_gemma3_fields_old_and_new_mean_the_same() -> None:
    base = {**SIZES, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 16}
    old = model_config_from_dict(
        {
            **base,
            "rope_theta": 2e6,
            "rope_local_base_freq": 5e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
        }
    )
    new = model_config_from_dict(
        {
            **base,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        }
    )
    assert replace(old, extra={}) == replace(new, extra={})
    assert old.windows == (16, 16, None) * 2
    assert (old.rope.theta, old.rope.params, old.local_rope) == (2e6, {"factor": 8.0}, RopeConfig(5e3, 256))
    assert old.context_length == 131072  # the file states the scaled length


def test_a_window_stays_where_it_has_its_own_positions() -> None:
    base = {**SIZES, "sliding_window": 4096, "max_position_embeddings": 128}
    gemma2 = model_config_from_dict({**base, "architectures": ["Gemma2ForCausalLM"]})
    gemma3 = model_config_from_dict({**base, "architectures": ["Gemma3ForCausalLM"]})
    assert gemma2.windows == ()
    assert gemma3.windows == (4096,) * 5 + (None,)


def test_the_text_part_of_a_multimodal_config() -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 6, "model_type": "gemma3_text", "sliding_window": 32}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "vision_config": {}}
    config = model_config_from_dict({**raw, "text_config": text, "torch_dtype": "bfloat16"})
    assert (config.hidden_size, config.num_heads, config.head_dim, config.dtype) == (64, 8, 256, "bfloat16")
    assert config.eos_token_ids == (1, 106)
    assert config.windows == (32,) * 5 + (None,)


@pytest.mark.parametrize(
    "old, new",
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            },
        ),
        (
            {
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
                "original_max_position_embeddings": 2048,
            },
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 2048,
                }
            },
        ),
    ],
)
def test_old_and_new_rope_fields_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert config_of(**old).rope == config_of(**new).rope


def test_rope_defaults() -> None:
    plain = config_of()
    assert (plain.rope.kind, plain.rope.theta, plain.rope.dim, plain.rope.params) == ("default", 1e4, 16, {})
    dynamic = config_of(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert dynamic.rope.params["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    "scaling, length",
    [
        (None, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            4096,
        ),
    ],
)
def test_context_length(scaling: dict[str, Any] | None, length: int) -> None:
    assert config_of(rope_scaling=scaling).context_length == length


def test_head_defaults() -> None:
    config = config_of()
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config_of(num_key_value_heads=2, head_dim=32).head_dim == 32
    assert config_of(architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize(
    "changes, window",
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, 1024),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 1024,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 1024),
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 1024,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            None,
        ),
        ({"sliding_window": 1024}, None),
    ],
)
def test_sliding_window_only_where_it_narrows(changes: dict[str, Any], window: int | None) -> None:
    assert config_of(**changes).layer_windows == (window if isinstance(window, tuple) else (window, window))


@pytest.mark.parametrize(
    "own, generation, merged",
    [
        (2, None, (2,)),
        ([2, 3], 3, (2, 3)),
        (2, [5, 2, 7], (2, 5, 7)),
        (None, 4, (4,)),
        (None, None, ()),
    ],
)
def test_eos_ids_of_both_files(own: Any, generation: Any, merged: tuple[int, ...]) -> None:
    config = model_config_from_dict({**LLAMA, "eos_token_id": own}, {"eos_token_id": generation})
    assert config.eos_token_ids == merged


def test_dtype_of_old_and_new_field() -> None:
    assert config_of(torch_dtype="bfloat16").dtype == "bfloat16"
    assert config_of(dtype="float16").dtype == "float16"
    assert config_of().dtype == "float32"


def test_biases_by_family() -> None:
    llama = config_of(attention_bias=True, mlp_bias=True)
    assert (llama.attention_bias, llama.attention_out_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = config_of(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"],
        ),
        ({"architectures": None, "model_type": "whisper"}, ["whisper"]),
        ({"rope_scaling": {"type": "spiral", "factor": 2}}, ["'spiral'", "longrope"]),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, ["low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention", "EmbeddingGemma"]),
        ({"quantization_config": {"quant_method": "quip"}}, ["'quip'", "GGUF"]),
        ({"architectures": ["StableLmForCausalLM"], "hidden_size": 65}, ["hidden_size=65", "4 heads of 16"]),
        ({"architectures": ["StableLmForCausalLM"], "head_dim": 32}, ["hidden_size=64", "4 heads of 32"]),
        ({"architectures": ["StableLMEpochForCausalLM"]}, ["StableLMEpochForCausalLM"]),
        ({"hidden_size": "64"}, ["hidden_size='64'"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn"]),
    ],
)
def test_bad_configs_are_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        config_of(**changes)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json.*cannot be read"):
        model_config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        model_config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        model_config_from_folder(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    assert generation_config_from_folder(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(
        json.dumps(
            {
                "temperature": 0.6,
                "top_p": 0.9,
                "top_k": 20,
                "do_sample": True,
                "min_p": None,
                "max_new_tokens": 9,
            }
        )
    )
    found = generation_config_from_folder(tmp_path)
    assert found == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 9}
    path.write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(ModelError, match="temperature='hot'"):
        generation_config_from_folder(tmp_path)


WRONG: list[Any] = [-1, 1.5, float("nan"), 1 << 40, 10**30, "x", [], [[]], {"a": 1}, True]


@pytest.mark.parametrize(
    "key",
    [
        *("architectures", "hidden_size", "head_dim", "num_attention_heads", "max_position_embeddings"),
        *("rms_norm_eps", "rope_parameters", "rope_theta", "partial_rotary_factor", "hidden_act", "dtype"),
        *("quantization_config", "sliding_window", "layer_types", "eos_token_id", "tie_word_embeddings"),
        *("text_config", "query_pre_attn_scalar", "final_logit_softcapping", "sliding_window_pattern"),
        *("rope_local_base_freq", "residual_multiplier", "logits_scaling", "hidden_activation"),
        *("layer_norm_eps", "qk_layernorm"),
    ],
)
@pytest.mark.parametrize(
    "family",
    [
        *("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"),
        *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM", "Olmo3ForCausalLM"),
        "StableLmForCausalLM",
    ],
)
def test_values_of_the_wrong_kind_are_the_files_fault(key: str, family: str) -> None:
    for value in WRONG:
        raw = {**LLAMA, "architectures": [family], "use_sliding_window": True, key: value}
        try:
            config = model_config_from_dict(raw)
        except ModelError as error:
            assert str(error).startswith("config.json: ")
        else:
            assert 0 < config.rope.dim <= config.head_dim
            assert 0 < config.max_position_embeddings < 1 << 31


@pytest.mark.parametrize("key", ["factor", "rope_theta", "original_max_position_embeddings"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_rope_numbers_of_the_wrong_kind_are_the_files_fault(kind: str, key: str) -> None:
    for value in (0.0, float("inf"), 1e17, *WRONG):
        rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64, key: value}
        try:
            config = config_of(rope_parameters=rope)
        except ModelError:
            continue
        assert 0 < config.context_length < 1 << 31


def test_files_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="not valid JSON"):
        model_config_from_folder(tmp_path)


def test_part_of_a_head_is_turned_only_where_the_family_does() -> None:
    assert config_of(partial_rotary_factor=1.0) == replace(
        config_of(), extra=config_of(partial_rotary_factor=1.0).extra
    )
    phi = config_of(architectures=["Phi3ForCausalLM"], partial_rotary_factor=0.5)
    assert phi.rope.dim == phi.head_dim // 2
    for changes in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(ModelError, match="partial_rotary_factor is not supported"):
            config_of(**changes)


@pytest.mark.parametrize("where", ["quantization_config", "compression_config"])
def test_quantized_checkpoints_are_refused_for_that_whatever_their_architecture(where: str) -> None:
    for architecture in ("LlamaForCausalLM", "GptOssForCausalLM", "Unheard"):
        for changes in (
            {where: {"quant_method": "mxfp4"}},
            {"text_config": {where: {"quant_method": "mxfp4"}}},
        ):
            with pytest.raises(ModelError, match="quantization by 'mxfp4'"):
                config_of(architectures=[architecture], **changes)
            with pytest.raises(ModelError, match="quantization by 'mxfp4'"):
                model_config_from_raw(
                    {**LLAMA, "architectures": [architecture], "model_type": "llama", **changes}
                )
    with pytest.raises(ModelError, match=r"quantization_config=\['awq'\]"):
        config_of(quantization_config=["awq"])


def test_values_that_are_not_supported_are_not_called_corrupt() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ModelError, match="clip_qkv=8.0 is not supported") as caught:
        config_of(architectures=["OlmoeForCausalLM"], clip_qkv=8.0, **experts)
    assert "malformed" not in str(caught.value)
