"""What `batch_invariant` refuses, and what it builds."""

from __future__ import annotations

import pytest
import torch

from octavo import LLM
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.layers.backends import resolve_backend
from octavo.models.config import LatentConfig, ModelConfig, MoEConfig, RopeConfig
from octavo.quantization.scheme import setting
from octavo.worker.batch_invariance import check_batch_invariant
from tests import tiny

GPU = torch.device("cuda", 0)
CONFIG = EngineConfig(batch_invariant=True)


EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_size=8, layers=(0,))
LATENT = LatentConfig(q_rank=None, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)


def model(**values: object) -> ModelConfig:
    sizes = dict(
        architecture="LlamaForCausalLM", vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1,
        num_heads=2, num_kv_heads=1, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4, dim=16),
    ) | values  # fmt: skip
    return ModelConfig(**sizes)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_settings_that_contradict_it():
    with pytest.raises(ConfigError, match="batch_invariant needs an NVIDIA GPU"):
        EngineConfig(batch_invariant=True, device="cpu")
    with pytest.raises(ConfigError, match="'torch'.*leave attention_backend out"):
        EngineConfig(batch_invariant=True, attention_backend="torch")


def test_devices(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, and the model runs on cpu"):
        check_batch_invariant(CONFIG, torch.device("cpu"), model(), False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(ConfigError, match=r"8\.0 or above, and cuda:0 has 7\.5"):
        check_batch_invariant(CONFIG, GPU, model(), False)


@pytest.mark.parametrize(
    ("values", "pooling", "said"),
    [
        ({}, True, "does not serve embeddings"),
        ({"implementation": "transformers"}, False, "LlamaForCausalLM through transformers"),
        ({"moe": EXPERTS}, False, "experts of LlamaForCausalLM"),
        ({"latent": LATENT}, False, "latent attention of LlamaForCausalLM"),
    ],
)
def test_models(a_gpu: None, values: dict[str, object], pooling: bool, said: str):
    with pytest.raises(ConfigError, match=f"batch_invariant .*{said}.*leave batch_invariant out"):
        check_batch_invariant(CONFIG, GPU, model(**values), pooling)
    check_batch_invariant(EngineConfig(), GPU, model(**values), pooling)  # without the setting: whatever


def test_a_dense_model_on_a_gpu_is_served(a_gpu: None):
    check_batch_invariant(CONFIG, GPU, model(), False)
    assert resolve_backend("auto", GPU, batch_invariant=True) == "invariant"
    assert resolve_backend("auto", GPU) == "triton"
    assert resolve_backend("auto", torch.device("meta"), batch_invariant=True) == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_engine_refuses_where_there_is_no_gpu():
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, and the model runs on cpu"):
        LLM(str(tiny.checkpoint("llama")), batch_invariant=True, skip_tokenizer_init=True)


def test_quantized_weights_are_refused():
    pytest.importorskip("triton")
    from octavo.models.loading import build_model

    with pytest.raises(ConfigError, match="batch_invariant multiplies no quantized weights .*int8"):
        int8 = setting("int8")
        build_model(model(), dtype=torch.float32, device="meta", quantization=int8, batch_invariant=True)
