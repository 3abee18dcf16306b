"""Building and filling a model: each checkpoint tensor exactly once, faults named in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.errors import ModelError
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.loading import build_model, load_weights, targets_of
from octavo.models.registry import model_class
from octavo.models.targets import canonical

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0, 4),
)


def build(config: ModelConfig = CONFIG, **settings):
    return build_model(
        config, **{"dtype": torch.float32, "device": "cpu", "attention_backend": "torch", **settings}
    )


def weights(config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in canonical(targets_of(config)).items()}


def test_every_parameter_is_filled():
    model = build()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    load_weights(model, ((n, t.double()) for n, t in weights().items()))
    packed = [m.packed for m in model.modules() if getattr(m, "packed", None) is not None]
    filled = [*model.parameters(), *(p.to_dense() if p.is_mkldnn else p for p in packed)]
    assert all(torch.isfinite(p).all() for p in filled)
    assert sum(p.numel() for p in filled) == sum(t.numel() for t in weights().values())
    assert not any(p.requires_grad for p in model.parameters())


def test_tied_model_holds_its_embedding_once():
    config = replace(CONFIG, tie_word_embeddings=True)
    model = build(config)
    load_weights(model, weights(config).items())
    head = model.lm_head
    assert head.packed is not None or head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_faults_are_named():
    good = weights()
    cases = [
        ({**good, "model.layers.9.mlp.up_proj.weight": torch.ones(2)}, r"1 unexpected \(model\.layers\.9"),
        (
            {n: t for n, t in good.items() if "k_proj" not in n},
            r"2 missing \(model\.layers\.0\.self_attn\.k_proj",
        ),
        (
            {**good, "model.norm.weight": torch.ones(17)},
            r"model\.norm\.weight has shape \[17\].* asks for \[16\]",
        ),
        ({}, r"21 missing \(.*, …\)"),
    ]
    for state, message in cases:
        with pytest.raises(ModelError, match=message) as caught:
            load_weights(build(), state.items())
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is given twice"):
        load_weights(build(), [("model.norm.weight", torch.ones(16))] * 2)


def test_derived_buffers_of_old_checkpoints_are_ignored():
    load_weights(
        build(), {**weights(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}.items()
    )


def test_unknown_architecture():
    with pytest.raises(
        ModelError, match="architecture 'GPT9ForCausalLM' is not supported: use a model of Llama"
    ):
        model_class("GPT9ForCausalLM")


@pytest.mark.parametrize("windows", [(), (12, 12), (None, 12), (12, None)])
def test_layers_get_their_windows_and_groups(windows: tuple[int | None, ...]):
    model = build(replace(CONFIG, windows=windows), device="meta", dtype=torch.bfloat16, block_size=8)
    layers = model.attention_layers()
    assert [layer.sliding_window for layer in layers] == list(windows or (None, None))
    for number, group in enumerate(model.kv_groups()):
        for index in group.layers:
            assert layers[index].kv_group == number


def test_only_what_can_be_recorded_is():
    device = torch.device("cpu")
    assert "torch attention cannot be captured" in str(build().why_no_graphs(torch.float32, device))
    model = build()
    for layer in model.attention_layers():
        layer.backend.recordable = True
    assert model.why_no_graphs(torch.float32, device) is None
