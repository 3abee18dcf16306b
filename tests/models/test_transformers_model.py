"""Decoders through Transformers' own code on the paged cache, against Transformers itself, in float32."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.models.hf_config import model_config_from_dict
from octavo.models.interface import CausalLM
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import ModelSource, find_model
from octavo.models.transformers_config import model_config_from_raw
from octavo.models.transformers_layers import SharedInput
from octavo.models.transformers_model import TransformersForCausalLM
from octavo.quantization.scheme import QuantizationConfig
from tests import tiny
from tests.models.paged import PagedRun

VOCAB = 199
BASE = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SLIDES = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

# Class prefix: changes to the base.
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32},
    "Gemma2": {
        **SLIDES, "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 9.0,
        "attn_logit_softcapping": 3.0, "initializer_range": 0.12,
    },
    "Gemma3": {**SLIDES, "head_dim": 16, "query_pre_attn_scalar": 16, "initializer_range": 0.12},
    "Phi3": {},
    "Olmo2": {"initializer_range": 0.3},
    "Granite": dict(
        logits_scaling=0.5, residual_multiplier=0.5, embedding_multiplier=3.0, attention_multiplier=0.3
    ),
    "StableLm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "qk_layernorm": True},
    "Starcoder2": {"sliding_window": 9},
    "Cohere": {"logit_scale": 0.7},
    "Cohere2": {**SLIDES, "head_dim": 16, "logit_scale": 0.7},
    "Glm4": {"head_dim": 16},
    "GPTNeoX": {"rotary_pct": 0.5},
    "GPT2": {"tie_word_embeddings": True},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Nemotron": {"initializer_range": 0.12},
    "Mixtral": EXPERTS,
    "Qwen3Moe": {**EXPERTS, "head_dim": 16},
}  # fmt: skip
LENGTHS = (41, 7, 23)
NEW_TOKENS = 64


pytestmark = pytest.mark.usefixtures("one_thread")


def hf_class(family: str, kind: str = "ForCausalLM") -> Any:
    return getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else kind}")


@functools.cache
def reference(family: str) -> Any:
    config_class = f"{family}{'Text' if family == 'Gemma3' else ''}Config"
    config = getattr(transformers, config_class)(**{**BASE, **DECODERS[family]})
    torch.manual_seed(3)
    model = hf_class(family)._from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.3)
        elif "norm" in name or "ln_" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


@functools.cache
def checkpoint(family: str) -> Path:
    folder = tiny.root() / f"transformers-{family}"
    reference(family).save_pretrained(folder)
    return folder


@functools.cache
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@functools.cache
def expected(family: str) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [reference(family)(torch.tensor([text])).logits[0] for text in texts()]


def is_greedy(family: str, text: list[int], tokens: list[int]) -> bool:
    """Whether Transformers, given a text and these tokens, finds each of them the likeliest."""
    with torch.inference_mode():
        logits = reference(family)(torch.tensor([text + tokens])).logits[0]
    return logits[len(text) - 1 : -1].argmax(-1).tolist() == tokens


def load(folder: Path, **settings: Any) -> CausalLM:
    source = ModelSource("folder", folder, "tiny")
    config = load_model_config(source, "transformers")
    values = dict(dtype=torch.float32, device="cpu", max_model_len=128, block_size=8) | settings
    model = build_model(config, **values)
    targets = load_targets(model)
    load_weights(
        model, iterate_weights(source, config, targets, "auto", torch.float32, "cpu", progress=False)
    )
    return model


def make(family: str, **settings: Any) -> LLM:
    values = dict(
        model_impl="transformers", dtype="float32", device="cpu", num_threads=1, max_model_len=128,
        skip_tokenizer_init=True, check_invariants=True, max_num_seqs=8, kv_cache_memory_bytes=4 << 20,
        block_size=8,
    ) | settings  # fmt: skip
    return LLM(str(checkpoint(family)), **values)


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)


@pytest.mark.proves("runs")
@pytest.mark.parametrize("family", DECODERS)
def test_logits_and_64_greedy_tokens_equal_transformers(family: str):
    model = load(checkpoint(family))
    assert isinstance(model, TransformersForCausalLM)
    for chunk in (1000, 7):
        ours = PagedRun(model, len(texts()), 128).prompts(texts(), chunk)
        for a, b in zip(ours, expected(family), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
            assert b.std() > 0.5  # else closeness would mean little
    run, tokens = PagedRun(model, 1, 128), []
    rows = texts()[1]
    while len(tokens) < NEW_TOKENS:
        tokens.append(int(run.step({0: rows})[0][-1].argmax()))
        rows = tokens[-1:]
    assert is_greedy(family, texts()[1], tokens)
    assert len(set(tokens)) >= 5  # GPT-2's tied matrix soon repeats itself


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2", "OPT"])
def test_int8_weights(family: str):
    model = load(checkpoint(family), quantization=QuantizationConfig("int8"))
    ours = PagedRun(model, len(texts()), 128).prompts(texts(), 1000)
    for a, b in zip(ours, expected(family), strict=True):
        assert float((a - b).std() / b.std()) < 0.1


@pytest.mark.parametrize("family", ["GPT2", "Cohere2", "Mixtral"])
def test_engine_with_chunks_prefix_hits_and_preemption(family: str):
    with make(family, max_num_batched_tokens=16) as llm:
        for round_ in range(2):
            outputs = llm.generate(texts(), GREEDY, use_tqdm=False)
            tokens = [o.outputs[0].token_ids for o in outputs]
            assert all(is_greedy(family, text, new) for text, new in zip(texts(), tokens, strict=True))
            assert (sum(o.num_cached_tokens for o in outputs) > 0) == (round_ > 0)
        per_block = sum(g.block_bytes() for g in llm.facts.groups) // len(llm.facts.groups)
        groups = len(llm.facts.groups)
    room = per_block * groups * 13  # 104 tokens, for 65 + 31 + 47
    with make(family, kv_cache_memory_bytes=room, look_ahead_admission=False) as llm:
        outputs = llm.generate(texts(), GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == tokens
        if groups == 1:  # blocks behind a window are freed, so that less is needed
            assert llm.stats().num_preemptions > 0


def test_auto_takes_a_family_where_one_is_known(tmp_path: Path):
    raw = transformers.LlamaConfig(**BASE).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    source = find_model(str(tmp_path))
    assert load_model_config(source).implementation == "octavo"
    assert load_model_config(source, "transformers").implementation == "transformers"
    gpt2 = find_model(str(checkpoint("GPT2")))
    assert load_model_config(gpt2).implementation == "transformers"
    with pytest.raises(ModelError, match="GPT2LMHeadModel is not supported"):
        load_model_config(gpt2, "octavo")
    with pytest.raises(ModelError, match="folders only"):
        load_model_config(ModelSource("gguf", tmp_path / "m.gguf", "m.gguf"), "transformers")


REFUSED = {
    "Falcon": ("ForCausalLM", {}, "computes attention itself"),
    "Bloom": ("ForCausalLM", {}, "counts positions itself"),
    "Mpt": ("ForCausalLM", {}, "counts positions itself"),
    "Mamba": ("ForCausalLM", {}, "recurrent state"),
    "FalconH1": ("ForCausalLM", {}, "recurrent state"),
    "Llama4": ("ForCausalLM", {}, "layers of the kind chunked_attention"),
    "GptOss": ("ForCausalLM", {"head_dim": 16}, "takes s_aux"),
    "DeepseekV2": ("ForCausalLM", {}, "differ in size"),
    "DiffLlama": ("ForCausalLM", {}, "runs twice per token"),
    "T5": ("ForConditionalGeneration", {}, "encoder with a decoder"),
}


@pytest.mark.proves("refused")
@pytest.mark.parametrize("family", REFUSED)
def test_what_paged_attention_cannot_do_is_refused_with_the_reason(family: str):
    kind, changes, reason = REFUSED[family]
    config_class = f"{family}{'Text' if family == 'Llama4' else ''}Config"
    raw = getattr(transformers, config_class)(**{**BASE, **changes}).to_dict()
    raw["architectures"] = [f"{family}{kind}"]
    with pytest.raises(ModelError, match=reason) as caught:
        build_model(model_config_from_raw(raw), dtype=torch.float32, device="meta")
    assert "\n" not in str(caught.value)


def test_kinds_of_model_that_state_no_heads_or_positions_are_not_called_corrupt():
    raw = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "max_position_embeddings": 256}
    with pytest.raises(ModelError, match="no attention heads") as caught:
        model_config_from_raw({**raw, "hidden_size": 64, "vocab_size": VOCAB})
    assert "fetch" not in str(caught.value)
    raw = transformers.BloomConfig(hidden_size=64, n_head=4).to_dict() | {
        "architectures": ["BloomForCausalLM"]
    }
    with pytest.raises(ModelError, match="no longest text"):
        model_config_from_raw(raw)
    raw = transformers.Gemma4TextConfig(head_dim=16, global_head_dim=32).to_dict()
    raw["architectures"] = ["Gemma4ForCausalLM"]
    assert model_config_from_raw(raw).head_dim == 32  # of some layers: the others have 16


# Code that asks more of its modules than to be called: one looks at the dtype of a router's matrix, one has
# buffers that the inner model alone knows how to compute, and sizes that are lists.
REACHING: dict[str, tuple[str, dict[str, Any]]] = {
    "HunYuanMoEV1": ("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": [2, 2], "head_dim": 16}),
    "Gemma3n": (
        "Gemma3nTextConfig",
        {
            **SLIDES, "head_dim": 16, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0, "laurel_rank": 8, "intermediate_size": [96, 96],
            "activation_sparsity_pattern": [0.9, 0.0],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", REACHING)
def test_code_that_reaches_into_its_modules(family: str):
    config_class, changes = REACHING[family]
    config = getattr(transformers, config_class)(**{**BASE, **changes})
    torch.manual_seed(3)
    theirs = hf_class(family)._from_config(config, attn_implementation="eager").eval()
    raw = theirs.config.to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    model = build_model(
        model_config_from_raw(raw), dtype=torch.float32, device="cpu", max_model_len=128, block_size=8
    )
    load_weights(model, theirs.state_dict().items())
    with torch.inference_mode():
        want = theirs(torch.tensor([texts()[0]])).logits[0]
    torch.testing.assert_close(PagedRun(model, 1, 128).prompts(texts()[:1], 7)[0], want, atol=1e-4, rtol=0)


def test_other_input_and_unknown_types_are_refused():
    raw = transformers.LlavaConfig().to_dict() | {"architectures": ["LlavaForConditionalGeneration"]}
    with pytest.raises(ModelError, match="also takes vision input"):
        model_config_from_raw(raw)
    with pytest.raises(ModelError, match="model_type 'gpt9' is known neither"):
        model_config_from_raw({"model_type": "gpt9", "architectures": ["GPT9ForCausalLM"]})
    bad = {**transformers.GPT2Config().to_dict(), "architectures": ["GPT2LMHeadModel"], "n_embd": "many"}
    with pytest.raises(ModelError, match="fetch the file again"):
        model_config_from_raw(bad)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.02 * i for i in range(8)], "long_factor": [1.0 + 0.4 * i for i in range(8)],
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("length", [24, 200])
def test_rope_is_fixed_by_the_context_as_in_the_families(kind: str, length: int):
    config = transformers.LlamaConfig(
        **{**BASE, "rope_parameters": ROPES[kind], "max_position_embeddings": 64}
    )
    raw = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    torch.manual_seed(1)
    state = transformers.LlamaForCausalLM(config).state_dict()
    results = []
    for model_config in (model_config_from_dict(raw), model_config_from_raw(raw)):
        model = build_model(
            model_config, dtype=torch.float32, device="cpu", max_model_len=length, attention_backend="torch"
        )
        load_weights(model, state.items())
        results.append(PagedRun(model, 1, 32).prompts([texts()[2]], 1000)[0])
    torch.testing.assert_close(*results, atol=2e-5, rtol=0)


def test_known_code_is_replaced_by_kernels():
    model = load(checkpoint("Llama"))
    layer = model.get_submodule("model.layers.0")
    assert sum(isinstance(m, SharedInput) for m in model.modules()) == 4
    assert {type(m).__name__ for m in layer.children()} == {"LlamaAttention", "LlamaMLP", "PlainNorm"}
    assert layer.self_attn.forward.__name__ == "attend" and "forward" in layer.mlp.__dict__
    qwen3 = load(checkpoint("Qwen3")).get_submodule("model.layers.0.self_attn")
    assert qwen3.forward.__name__ == "attend"
    # Its own code around our rotation.
    stablelm = load(checkpoint("StableLm")).get_submodule("model.layers.0.self_attn")
    assert stablelm.forward.__name__ == "forward" and "forward" in stablelm.__dict__
    # Interleaved pairs are another rotation: its own code stays.
    glm = load(checkpoint("Glm4")).get_submodule("model.layers.0")
    assert "forward" not in glm.self_attn.__dict__
    assert "forward" not in type(reference("Llama")).__dict__["__init__"].__dict__
    assert all(
        "forward" not in m.__dict__ for m in reference("Llama").modules()
    )  # others' models as they were


def test_shared_products_follow_the_tensor_they_are_called_with():
    model = load(checkpoint("Llama"))
    attention = model.get_submodule("model.layers.0.self_attn")
    theirs = reference("Llama").model.layers[0].self_attn
    x, y = torch.randn(1, 3, 64), torch.randn(1, 5, 64)
    with torch.inference_mode():
        for name, tensor in [("q_proj", x), ("k_proj", y), ("v_proj", y), ("k_proj", x), ("q_proj", x)]:
            torch.testing.assert_close(getattr(attention, name)(tensor), getattr(theirs, name)(tensor))


@pytest.mark.parametrize("family", ["GPTNeoX", "GPT2"])
def test_old_names_and_bare_decoders_load(family: str, tmp_path: Path):
    """As pythia's and gpt2's own checkpoints: other names for the head, buffers, no prefix."""
    state = dict(reference(family).state_dict())
    if family == "GPTNeoX":
        state["embed_out.weight"] = state.pop("lm_head.weight")
        for layer in range(2):
            state[f"gpt_neox.layers.{layer}.attention.bias"] = torch.ones(1, 1, 8, 8)
    else:
        del state["lm_head.weight"]
        state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((checkpoint(family) / "config.json").read_bytes())
    ours = PagedRun(load(tmp_path), 3, 64).prompts(texts(), 1000)
    for a, b in zip(ours, expected(family), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_wrong_checkpoints_are_named(tmp_path: Path):
    state = dict(reference("Cohere").state_dict())
    raw = (checkpoint("Cohere") / "config.json").read_bytes()
    cases = {
        "is missing": {k: v for k, v in state.items() if "layers.1.mlp.up_proj" not in k},
        "has no place": {**state, "model.layers.7.mlp.up_proj.weight": torch.ones(2)},
        "has shape": {**state, "model.norm.weight": torch.ones(65)},
    }
    for message, tensors in cases.items():
        folder = tmp_path / message.replace(" ", "-")
        folder.mkdir()
        (folder / "config.json").write_bytes(raw)
        torch.save(tensors, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match=message):
            load(folder)


def test_random_weights():
    for family in ("Qwen3Moe", "GPT2"):
        results = []
        for seed in (3, 3, 4):
            with make(family, load_format="dummy", seed=seed) as llm:
                outputs = llm.generate(texts()[:1], GREEDY.clone(max_tokens=4), use_tqdm=False)
                results.append(outputs[0].outputs[0].token_ids)
        assert results[0] == results[1] != results[2]
