"""Tensor parallelism changes nothing, whatever else is on: whole engine, against Transformers in float32.

Ranks are threads here; `test_ranks.py` has them as they are.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv.capacity import request_blocks
from octavo.kv.groups import page_bytes
from octavo.models.locate import configured_model
from octavo.planning.plan import Layout, Machine, Planner
from tests import tiny
from tests.engine import quantized_kv
from tests.engine.test_embed import decoder
from tests.engine.test_llm_parity import GREEDY, expected, generate, make
from tests.parallel.thread_executor import thread_ranks  # noqa: F401 (a fixture)
from tests.tiny import eagle3

pytestmark = pytest.mark.usefixtures("thread_ranks", "one_thread")
VARIANTS = sorted(tiny.VARIANTS)


CPU = Machine("cpu", "this CPU", 1 << 40, 0)
# Sizes that 3 divides; 385 tokens are padded on so many ranks.
THREE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 385}


def short(llm: LLM) -> list[list[int]]:
    params = GREEDY.clone(max_tokens=24)
    return [o.outputs[0].token_ids for o in llm.generate(tiny.PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("variant", "ranks"), [*((v, 2) for v in VARIANTS), *((v, 4) for v in ("llama", "gemma3", "qwen3-moe"))]
)  # 4: with two ranks to a KV head
def test_variants_equal_transformers(variant, ranks):
    """In chunks, and again with the prompts' blocks in the cache."""
    want = [tokens[:24] for tokens in expected(variant)]
    with make(variant, tensor_parallel_size=ranks, max_num_batched_tokens=13, block_size=8) as llm:
        assert short(llm) == want
        before = llm.stats().prefix_cache_hits
        assert short(llm) == want
        assert llm.stats().prefix_cache_hits - before == sum((len(p) - 1) // 8 * 8 for p in tiny.PROMPTS)


@functools.cache
def for_three(variant: str) -> tuple[Any, Path]:
    """A variant with sizes that 3 divides: Transformers' model, and its folder."""
    changes = dict(THREE)
    if variant.startswith("deepseek"):
        changes["num_key_value_heads"] = 6
    if "moe_intermediate_size" in tiny.VARIANTS[variant][1]:
        changes["moe_intermediate_size"] = 48
    model = tiny.build(variant, **changes)
    folder = tiny.root() / f"{variant}-on-three"
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("variant", ["llama-tied", "gemma3", "qwen3-moe", "deepseek-v3"])
def test_three_ranks_equal_transformers(variant, experts):
    model, folder = for_three(variant)
    settings = dict(tensor_parallel_size=3, enable_expert_parallel=experts, model=str(folder))
    with make("llama", **settings) as llm:
        found = generate(llm)
    for prompt, tokens in zip(tiny.PROMPTS, found, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((scores.amax(1) - chosen).max()) < 1e-4  # a tie may fall either way
        assert scores.std() > 0.5


@pytest.mark.parametrize(
    ("variant", "slots"), [("llama", 0), ("llama", 100), ("gemma3", 100), ("deepseek-v3", 0)]
)
def test_preemption_and_swap_change_nothing(variant, slots):
    settings = dict(tensor_parallel_size=2, block_size=8, max_num_batched_tokens=64)
    with make(variant, **settings) as llm:
        groups = llm.facts.groups
    # Room for the longest request, and not for all of them.
    longest = max(map(len, tiny.PROMPTS)) + tiny.NEW_TOKENS
    page, blocks = page_bytes(groups), request_blocks(groups, longest, rows=7) + len(groups)
    few = dict(kv_cache_memory_bytes=blocks * page, look_ahead_admission=False)
    with make(variant, swap_space=slots * page / (1 << 30), **settings, **few) as llm:
        assert llm.facts.num_host_blocks == slots
        for _ in range(2):
            assert generate(llm, tiny.PROMPTS[::-1]) == expected(variant)[::-1]
        stats = llm.stats()
        assert stats.num_preemptions > 0 and stats.kv_blocks_used == 0
        assert (stats.host_blocks_out > 0) == (slots > 0)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_cache_of_8_bits(kind):
    """FP8: the scales are those of a rank's heads, their digest the same on all (the executor checks it)."""
    quantized_kv.check_quality("qwen2", "cpu", kind, tensor_parallel_size=2)
    with make("qwen2", tensor_parallel_size=2, kv_cache_dtype=kind) as llm:
        first, again = generate(llm), generate(llm)
        assert llm.stats().prefix_cache_hits > 0
    assert again == first


DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "itself": {"method": "draft_model", "model": "llama"},
    "another": {"method": "draft_model", "model": "qwen2"},
    "head": {"method": "eagle3"},
}


@pytest.mark.parametrize("how", DRAFTS)
def test_speculation_changes_no_token(how):
    config = {"num_speculative_tokens": 4, "adaptive": False, **DRAFTS[how]}
    if how == "head":
        config["model"] = str(eagle3.head("specforge", "llama"))
    elif "model" in config:
        config["model"] = str(tiny.checkpoint(config["model"]))
    settings = dict(tensor_parallel_size=2, speculative_config=config, async_scheduling=True)
    with make("llama", **settings) as llm:
        for _ in range(2):
            assert generate(llm) == expected("llama")
        stats = llm.stats()
        assert stats.spec_draft_tokens > 0
        if how == "itself":
            assert stats.spec_accepted_tokens == stats.spec_draft_tokens


SAMPLED = [
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=3, prompt_logprobs=2, detokenize=False),
    SamplingParams(temperature=1.1, seed=4, max_tokens=20, top_p=0.8, top_k=20, min_p=0.02, detokenize=False),
    SamplingParams(
        temperature=0.7, seed=5, max_tokens=20, repetition_penalty=1.2, logit_bias={9: 2.0}, detokenize=False
    ),
]


def test_seeded_samples_and_logprobs_are_those_of_one_rank():
    def sample(ranks: int) -> list[Any]:
        with make("qwen3", tensor_parallel_size=ranks, async_scheduling=True) as llm:
            return llm.generate(tiny.PROMPTS, SAMPLED, use_tqdm=False)

    for got, want in zip(sample(2), sample(1), strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        told = [*(got.outputs[0].logprobs or []), *(got.prompt_logprobs or [])]
        other = [*(want.outputs[0].logprobs or []), *(want.prompt_logprobs or [])]
        for one, two in zip(told, other, strict=True):
            assert (one is None) == (two is None)
            for token in one or ():
                assert abs(one[token].logprob - two[token].logprob) < 1e-4


@pytest.mark.parametrize("overlap", [False, True])
def test_structured_output(overlap):
    params = [
        SamplingParams(
            temperature=0.8, seed=i, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=regex)
        )
        for i, regex in enumerate((r"[a-f]{3,9}-[0-9]{4}", r"(yes|no), [A-Z][a-z]{1,6}\."))
    ]

    def texts(ranks: int) -> list[str]:
        settings = dict(tensor_parallel_size=ranks, skip_tokenizer_init=False, async_scheduling=overlap)
        with make("llama", **settings) as llm:
            outputs = llm.generate([tiny.PROMPTS[0], tiny.PROMPTS[1]], params, use_tqdm=False)
            assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "stop"]
            return [o.outputs[0].text for o in outputs]

    assert texts(2) == texts(1)


def test_embeddings(tmp_path):
    folder = decoder("qwen3", tmp_path)
    vectors = []
    for ranks in (1, 2):
        with LLM(
            str(folder), runner="pooling", dtype="float32", device="cpu", num_threads=1,
            tensor_parallel_size=ranks, max_num_batched_tokens=16, skip_tokenizer_init=True,
            kv_cache_memory_bytes=4 << 20, check_invariants=True,
        ) as llm:  # fmt: skip
            prompts = [{"prompt_token_ids": p} for p in tiny.PROMPTS]
            vectors.append([torch.tensor(o.outputs.embedding) for o in llm.embed(prompts, use_tqdm=False)])
    for one, other in zip(*vectors, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(level):
    with make("llama", tensor_parallel_size=2, kv_cache_dtype="fp8") as llm:
        want = generate(llm)
        assert llm.sleep(level).freed_bytes > 0
        llm.wake_up()
        assert generate(llm) == want


@pytest.mark.parametrize("quantization", ["int8", "int8_weight_only", "fp8"])
def test_weights_quantized_while_loading(quantization):
    """Rounded by what each rank holds of a row: about as close as on one rank."""
    errors = []
    for ranks in (1, 2):
        with make("llama", tensor_parallel_size=ranks, quantization=quantization) as llm:
            scores = quantized_kv.scores(llm)
        want = torch.cat([quantized_kv.chosen(tiny.logits("llama", p), p) for p in tiny.PROMPTS])
        errors.append(float((scores - want).square().mean().sqrt()))
    assert 1e-6 < errors[1] < 2 * errors[0]


@pytest.mark.parametrize("variant", ["llama-tied", "gemma2", "qwen3-moe"])
def test_the_ledger_is_the_planned_one(variant):
    with make(variant, tensor_parallel_size=2) as llm:
        found = llm.facts.memory
        config: EngineConfig = llm.config
    plan = Planner(configured_model(config)).plan(config, CPU, Layout(tensor=2))
    for kind in ("weights", "kv_cache", "tables"):
        assert plan.ledger.held[kind] == found[kind], kind


def test_a_kv_head_is_counted_where_it_is_held():
    with make("llama", tensor_parallel_size=4) as llm:
        assert [group.format.num_kv_heads for group in llm.facts.groups] == [1]


def test_models_through_transformers_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is not supported for models that run"):
        make("llama", tensor_parallel_size=2, model_impl="transformers")


def test_a_setting_that_means_nothing_to_one_rank():
    with make("llama", distributed_executor_backend="uni") as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)] == (
            expected("llama")
        )
