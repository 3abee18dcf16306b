"""`MoEConfig` out of the config.json files that well-known mixtures of experts come with."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.config import MoEConfig
from octavo.models.hf_config import model_config_from_dict

# What their config.json say, as far as it matters here (mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B,
# Qwen/Qwen1.5-MoE-A2.7B).
MIXTRAL: dict[str, Any] = dict(
    architectures=["MixtralForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
    max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-5, sliding_window=None, vocab_size=32000,
    torch_dtype="bfloat16",
)  # fmt: skip
QWEN3: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=1, head_dim=128, hidden_size=2048,
    intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[],
    moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
    num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, rope_theta=1e6,
    sliding_window=None, use_sliding_window=False, vocab_size=151936, torch_dtype="bfloat16",
)  # fmt: skip
QWEN2: dict[str, Any] = dict(
    architectures=["Qwen2MoeForCausalLM"], decoder_sparse_step=1, hidden_size=2048, intermediate_size=5632,
    max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408, norm_topk_prob=False,
    num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
    num_key_value_heads=16, rope_theta=1e6, shared_expert_intermediate_size=5632, sliding_window=32768,
    use_sliding_window=False, vocab_size=151936, torch_dtype="bfloat16",
)  # fmt: skip


def test_known_models() -> None:
    assert model_config_from_dict(MIXTRAL).moe == MoEConfig(8, 2, 14336, tuple(range(32)))
    config = model_config_from_dict(QWEN3)
    assert config.moe == MoEConfig(128, 8, 768, tuple(range(48)))
    assert config.qk_norm and config.windows == ()
    config = model_config_from_dict(QWEN2)
    assert config.moe == MoEConfig(60, 4, 1408, tuple(range(24)), shared_size=5632, renormalize=False)
    assert config.attention_bias and config.windows == ()


def test_layers_without_experts() -> None:
    config = model_config_from_dict(QWEN3 | {"decoder_sparse_step": 3, "mlp_only_layers": [5, 6]})
    assert config.moe is not None and config.moe.layers == (2, *range(8, 48, 3))
    assert model_config_from_dict(QWEN3 | {"num_experts": 0}).moe is None
    assert model_config_from_dict(QWEN3 | {"mlp_only_layers": list(range(48))}).moe is None


def test_windows() -> None:
    slides = {"use_sliding_window": True, "sliding_window": 512}
    assert model_config_from_dict(QWEN3 | slides).windows == (512,) * 48
    assert model_config_from_dict(MIXTRAL | {"sliding_window": 4096}).windows == (4096,) * 32
    windows = model_config_from_dict(QWEN2 | slides).windows
    assert windows == tuple(512 if i % 2 == 0 and i < 21 else None for i in range(24))


@pytest.mark.parametrize(
    ("raw", "change", "words"),
    [
        (MIXTRAL, {"num_experts_per_tok": 9}, "9 experts for each token of 8"),
        (QWEN3, {"num_experts_per_tok": 0}, "0 experts for each token of 128"),
        (QWEN3, {"moe_intermediate_size": 0}, "experts of inner size 0"),
        (QWEN3, {"decoder_sparse_step": 0}, "malformed"),
        (QWEN3, {"num_experts": "many"}, "malformed"),
    ],
)
def test_what_cannot_be_is_named(raw: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        model_config_from_dict(raw | change, where="m/config.json")
    assert str(caught.value).startswith("m/config.json: ") and "\n" not in str(caught.value)
