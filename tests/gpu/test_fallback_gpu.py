"""Decoders through Transformers' code on a GPU, with and without graphs, against Transformers itself."""

from __future__ import annotations

import pytest
import torch

from tests.models.paged import PagedRun
from tests.models.test_transformers_model import (
    DECODERS,
    GREEDY,
    LENGTHS,
    checkpoint,
    expected,
    is_greedy,
    load,
    make,
    texts,
)

pytestmark = pytest.mark.gpu


def tokens(family: str, **settings) -> list[list[int]]:
    bf16 = settings.get("dtype") == "bfloat16"
    values = {"device": "cuda", "kv_cache_memory_bytes": 64 << 20, "block_size": 16, **settings}
    with make(family, **values) as llm:
        # Recording a graph fails on whatever waits for the device, and so do experts in float32.
        graphs = not values.get("enforce_eager") and ("Mo" not in family and family != "Mixtral" or bf16)
        assert ("CUDA graphs" in llm.facts.summary["decode steps"]) == graphs
        return [o.outputs[0].token_ids for o in llm.generate(texts(), GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("family", DECODERS)
def test_logits_equal_transformers(family: str):
    model = load(checkpoint(family), device="cuda", attention_backend="triton", block_size=16)
    for chunk in (1000, 7, 1):
        ours = PagedRun(model, len(LENGTHS), 64).prompts(texts(), chunk)
        for a, b in zip(ours, expected(family), strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", DECODERS)
def test_greedy_tokens_with_graphs(family: str):
    """In float32, where experts run eagerly, all else as graphs."""
    found = tokens(family)
    assert all(is_greedy(family, text, new) for text, new in zip(texts(), found, strict=True))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "GPT2", "Qwen3Moe"])
def test_graphs_change_nothing_in_bfloat16(family: str):
    assert tokens(family, dtype="bfloat16") == tokens(family, dtype="bfloat16", enforce_eager=True)
