"""Drafts change no token: models in float32, drafted for and not, with everything that a request can ask."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine import core as core_module
from octavo.speculative.proposer import HostProposer, Proposal
from tests import tiny
from tests.engine.speculative_methods import check_choices
from tests.engine.test_llm_parity import expected, generate, make


class Knowing(HostProposer):
    """Drafts what a request yielded before, with errors."""

    def __init__(self, right: float):
        self._right, self._draw = right, random.Random(1)
        self.answers: list[list[int]] = []  # prompts with what followed them

    def propose(self, slot: int, tokens: np.ndarray, most: int) -> Proposal:
        known = tokens.tolist()
        answer = next((a for a in self.answers if a[: len(known)] == known), known)
        draft = answer[len(known) : len(known) + self._draw.randint(0, most)]
        wrong = [t if self._draw.random() < self._right else self._draw.randrange(100) for t in draft]
        return Proposal(np.array(wrong, np.int32), 0)


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> Knowing:
    proposer = Knowing(0.8)
    monkeypatch.setattr(core_module, "make_host_proposer", lambda config: proposer)
    return proposer


def drafted(variant: str, most: int = 4, **settings: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": most, "adaptive": False}
    return make(variant, speculative_config=config, **settings)


def check_drafted(llm: LLM) -> None:
    """Some drafts stood and some did not."""
    stats = llm.stats()
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


VARIANTS = ["llama", "qwen3", "gemma2", "gemma3", "mixtral", "deepseek_v3", "stablelm"]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v in tiny.VARIANTS])
def test_greedy_equals_transformers(variant: str, knowing: Knowing):
    knowing.answers = [p + e for p, e in zip(tiny.PROMPTS, expected(variant), strict=True)]
    with drafted(variant) as llm:
        assert generate(llm) == expected(variant)
        check_drafted(llm)


# Requests are preempted.
SMALL = dict(kv_cache_memory_bytes=320 << 10, block_size=8, look_ahead_admission=False)


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=7),
        dict(async_scheduling=True),
        dict(**SMALL),
        dict(**SMALL, swap_space=0.01),
        dict(enable_prefix_caching=False),
        dict(attention_backend="torch"),
        dict(enforce_eager=True),
    ],
)
def test_whatever_the_engine_does_beside(settings: dict[str, Any], knowing: Knowing):
    variant = "qwen3"
    knowing.answers = [p + e for p, e in zip(tiny.PROMPTS, expected(variant), strict=True)]
    with drafted(variant, **settings) as llm:
        assert generate(llm) == expected(variant)
        assert generate(llm) == expected(variant)  # with what the prefix cache holds
        check_drafted(llm)
        if "kv_cache_memory_bytes" in settings:
            assert llm.stats().num_preemptions


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_caches_in_8_bits(kv_cache_dtype: str, knowing: Knowing):
    settings = dict(kv_cache_dtype=kv_cache_dtype)
    with make("llama", **settings) as llm:
        plain = generate(llm)
    knowing.answers = [p + e for p, e in zip(tiny.PROMPTS, plain, strict=True)]
    with drafted("llama", **settings) as llm:
        assert generate(llm) == plain
        check_drafted(llm)


PARAMS = [
    dict(temperature=0.0, frequency_penalty=2.0),
    dict(temperature=0.0, frequency_penalty=-2.0, presence_penalty=1.0),
    dict(temperature=0.8, seed=5, repetition_penalty=1.3),
    dict(temperature=1.0, seed=6, top_p=0.9, top_k=20),
    dict(temperature=0.0, min_tokens=12, stop_token_ids=list(range(60))),
    dict(temperature=0.9, seed=7, logit_bias={5: 4.0}, min_p=0.05),
    dict(temperature=1.0, seed=8, n=3),
]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_whatever_requests_ask(logprobs: int | None, knowing: Knowing):
    """Tokens equal; log-probabilities as many as tokens, those of plain decoding within 1e-3."""
    params = [
        SamplingParams(max_tokens=24, detokenize=False, logprobs=logprobs, **fields) for fields in PARAMS
    ]
    prompts = [tiny.PROMPTS[i % len(tiny.PROMPTS)] for i in range(len(params))]
    with make("qwen3") as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    knowing.answers = [
        [*prompt, *choice.token_ids]
        for prompt, output in zip(prompts, plain, strict=True)
        for choice in output.outputs
    ]
    with drafted("qwen3", most=6) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check_drafted(llm)
    check_choices(outputs, plain)
    assert all((choice.logprobs is None) == (logprobs is None) for o in outputs for choice in o.outputs)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_text_that_repeats(method: str):
    prompt = [5, 6, 7, 8, 9] * 6
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    with make("llama") as llm:
        plain = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    config = {"method": method, "num_speculative_tokens": 5, "adaptive": False}
    with make("llama", speculative_config=config) as llm:
        assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == plain
        stats = llm.stats()
        assert stats.spec_draft_tokens > 0
        assert sum(stats.spec_accepted_per_pos) == stats.spec_accepted_tokens
