"""SmolLM2-135M-Instruct in float32 against Transformers, which gets the same dequantized weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.quantization import linear_method
from tests.models.paged import PagedRun
from tests.models.parity import assert_as_exact, greedy, read

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
    "天空为什么是蓝色的？",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. " * 12 + "Now the same backwards:",
]
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def transformers_model(default_model) -> Any:
    import transformers

    from octavo.models.loader import iterate_weights, load_model_config
    from octavo.models.loading import targets_of
    from octavo.models.locate import find_model

    source = find_model(str(default_model))
    config = load_model_config(source)
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=True,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(theirs).float().eval()
    weights = dict(
        iterate_weights(source, config, targets_of(config), "auto", torch.float32, "cpu", progress=False)
    )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def llm(default_model):
    with LLM(
        str(default_model), dtype="float32", quantization="none", device="cpu", max_model_len=1024,
        kv_cache_memory_bytes=256 << 20, max_num_batched_tokens=64, check_invariants=True,
    ) as made:  # fmt: skip
        yield made


@pytest.mark.proves("64 greedy tokens", model="SmolLM2-135M-Instruct (GGUF, Q4_1)")
def test_64_greedy_tokens_are_those_of_transformers(llm, transformers_model):
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for _ in range(2):  # cold, then with the prompts' blocks in the cache
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for output in outputs:
            want, lead = greedy(transformers_model, output.prompt_token_ids, NEW_TOKENS)
            assert output.outputs[0].token_ids == want, f"smallest lead in Transformers: {lead:.1e}"


@pytest.mark.proves("logits at every position", model="SmolLM2-135M-Instruct (GGUF, Q4_1)")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@torch.inference_mode()
def test_logits_at_every_position_are_those_of_transformers(
    packed, default_model, llm, transformers_model, monkeypatch
):
    """Rounding is magnified here: the residual stream of a first token reaches 22000."""
    exact_model = deepcopy(transformers_model).double()
    if not packed:
        monkeypatch.setattr(linear_method, "packs", lambda *_: False)
    model = read(default_model, backend="cpu", block_size=16, max_model_len=1024)
    texts = [llm.get_tokenizer().encode(text) for text in PROMPTS]
    want = [transformers_model(torch.tensor([ids])).logits[0] for ids in texts]
    exact = [exact_model(torch.tensor([ids])).logits[0] for ids in texts]
    for chunk in (7, 64, 1024):
        ours = PagedRun(model, len(texts), 512).prompts(texts, chunk)
        assert_as_exact(ours, want, exact)
