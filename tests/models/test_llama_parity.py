"""The Llama family against Transformers, float32, on tiny random models of every variant."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers

from octavo.kernels import ops
from octavo.models.config import ModelConfig
from octavo.models.interface import CausalLM
from octavo.parallel.state import use_group
from tests.models.paged import PagedRun
from tests.models.parity import assert_equal, converted, random_model, random_prompts
from tests.parallel.threads import on_ranks

BASE = dict(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    initializer_range=0.25,
)
THETA = {"rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.0 + 0.4 * i for i in range(8)],
    **THETA,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}


def _rope(**params: object) -> dict[str, object]:
    return {"rope_parameters": {**THETA, **params}}


VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "llama-linear": ("Llama", _rope(rope_type="linear", factor=4.0)),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "llama-dynamic": ("Llama", _rope(rope_type="dynamic", factor=4.0)),
    "llama-dynamic-long": (
        "Llama",
        {**_rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 32},
    ),
    "llama-longrope-short": (
        "Llama",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}},
    ),
    "llama-longrope-long": ("Llama", {"rope_parameters": LONGROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias": ("Qwen3", {"attention_bias": True}),
}
# Transformers scales dynamic rope and longrope by the text's length, Octavo by max_model_len: equal
# where the longest text below is as long as that.
LENGTHS = (41, 7, 23)
MAX_MODEL_LEN = {"llama-longrope-short": 64, "llama-dynamic-long": LENGTHS[0], "llama-longrope-long": 128}


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def hf_model(variant: str) -> tuple[transformers.PreTrainedModel, ModelConfig]:
    family, changes = VARIANTS[variant]
    return random_model(family, {**BASE, **changes}, variant)


def prompts(variant: str) -> list[list[int]]:
    return random_prompts(BASE["vocab_size"], LENGTHS)


@functools.cache
def expected(variant: str) -> list[torch.Tensor]:
    model, _ = hf_model(variant)
    with torch.inference_mode():
        if variant in ("llama-dynamic-long", "llama-longrope-long"):
            # Only the text as long as max_model_len compares; the others ride along in the batch.
            return [model(torch.tensor([prompts(variant)[0]])).logits[0].float()]
        return [model(torch.tensor([p])).logits[0].float() for p in prompts(variant)]


def octavo_model(
    variant: str,
    block_size: int = 16,
    backend: str = "torch",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    return converted(
        *hf_model(variant),
        dtype=dtype,
        device=device,
        attention_backend=backend,
        max_model_len=MAX_MODEL_LEN.get(variant, 128),
        block_size=block_size,
    )


def check(actual: list[torch.Tensor], variant: str) -> None:
    theirs = expected(variant)
    assert_equal(actual[: len(theirs)], theirs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str):
    model = octavo_model(variant, block_size=8)
    texts = prompts(variant)
    for chunk in (1000, 7):
        check(PagedRun(model, len(texts), 48).prompts(texts, chunk), variant)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3"])
def test_chunks_and_block_sizes(variant: str, block_size: int, backend: str):
    model = octavo_model(variant, block_size, backend)
    texts = prompts(variant)
    for chunk in (1, 7, 1000):
        check(PagedRun(model, len(texts), 64, seed=chunk).prompts(texts, chunk), variant)


@pytest.mark.parametrize("variant", ["llama-yarn", "qwen3"])
def test_plain_operations(variant: str, monkeypatch: pytest.MonkeyPatch):
    """Without kernels of the device, as where no compiler is found."""
    monkeypatch.setattr(ops, "kernels_for", lambda device, dtype: ops.REFERENCE)
    texts = prompts(variant)
    check(PagedRun(octavo_model(variant), len(texts), 48).prompts(texts, 9), variant)


def test_mixed_batch_of_prefill_and_decode_with_padding():
    model = octavo_model("qwen2", block_size=8)
    texts = prompts("qwen2")
    run = PagedRun(model, 3, 64)
    parts = [[run.step({0: texts[0][:40]}, padding=2)[0]], [], []]
    mixed = run.step({2: texts[2][:9], 0: texts[0][40:], 1: texts[1]}, padding=3)
    last = run.step({2: texts[2][9:]})
    for i in range(3):
        parts[i].append(mixed[i])
    parts[2].append(last[2])
    check([torch.cat(x) for x in parts], "qwen2")


def test_greedy_tokens_equal_transformers():
    hf, _ = hf_model("llama")
    model = octavo_model("llama", block_size=8)
    prompt = prompts("llama")[1]
    run = PagedRun(model, 1, 80)
    tokens = [int(run.step({0: prompt})[0][-1].argmax())]
    while len(tokens) < 64:
        tokens.append(int(run.step({0: tokens[-1:]})[0][-1].argmax()))
    out = hf.generate(torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False)
    assert tokens == out[0, len(prompt) :].tolist()
    assert len(set(tokens)) >= 20


@pytest.mark.proves("tensor parallel")
@pytest.mark.parametrize("variant", ["llama-biases", "qwen2-tied", "qwen3"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_equal_one(variant: str, size: int):
    """Two KV heads over 2 ranks (one each) and over 4 (each held twice); 199 tokens are padded."""
    texts = prompts(variant)

    def rank(group):
        with use_group(group):
            model = octavo_model(variant, block_size=8)
        assert [g.format.num_kv_heads for g in model.kv_groups()] == [max(1, 2 // size)]
        return PagedRun(model, len(texts), 48).prompts(texts, 9)

    hf_model(variant), expected(variant)
    for result in on_ranks(size, rank):
        check(result, variant)


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "cpu"), pytest.param("cuda", "triton", marks=pytest.mark.gpu)]
)
def test_bfloat16_stays_near_float32(device: str, backend: str):
    model = octavo_model("llama", 16, backend, device, torch.bfloat16)
    texts = prompts("llama")
    for ours, theirs in zip(PagedRun(model, 3, 64).prompts(texts, 8), expected("llama"), strict=True):
        difference = ours.log_softmax(-1) - theirs.log_softmax(-1)
        assert difference.abs().mean() < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_on_gpu(variant: str):
    model = octavo_model(variant, 16, "triton", "cuda")
    texts = prompts(variant)
    for chunk in (1, 7, 1000):
        check(PagedRun(model, len(texts), 64).prompts(texts, chunk), variant)
