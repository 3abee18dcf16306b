"""Every method over many prompts, seeds and lengths of drafts: token for token what the model says alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from octavo import SamplingParams
from tests import tiny
from tests.engine.speculative_methods import METHODS, check_drafted, config, drafted, longer
from tests.engine.test_llm_parity import GREEDY, make
from tests.tiny.variants import SPECIAL_TOKENS, VOCAB_SIZE

LENGTH, NEW = 512, 256


@functools.cache
def prompts() -> list[list[int]]:
    """Fifty, of which a third repeat themselves."""
    rng = np.random.default_rng(5)
    out = []
    for i in range(50):
        tokens = rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, int(rng.integers(4, 60))).tolist()
        out.append((tokens[:8] * 7)[: len(tokens) + 20] if i % 3 == 0 else tokens)
    return out


@functools.cache
@torch.no_grad()
def oracle() -> list[tuple[list[int], list[float]]]:
    """Transformers' greedy continuations, and by how much each token leads."""
    model = tiny.build("llama", max_position_embeddings=LENGTH)
    answers = []
    for prompt in prompts():
        tokens, leads, cache, ids = [], [], None, torch.tensor([prompt])
        for _ in range(NEW):
            result = model(ids, past_key_values=cache, use_cache=True)
            cache, (first, second) = result.past_key_values, result.logits[0, -1].topk(2).values.tolist()
            tokens.append(int(result.logits[0, -1].argmax()))
            leads.append(first - second)
            ids = torch.tensor([tokens[-1:]])
        answers.append((tokens, leads))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_fifty_greedy_answers_of_256_tokens_are_transformers(method: str):
    params = GREEDY.clone(max_tokens=NEW)
    settings: dict[str, Any] = dict(
        model=str(longer(LENGTH)),
        max_model_len=LENGTH,
        kv_cache_memory_bytes=32 << 20,
        check_invariants=False,
    )
    with drafted(method, 5, LENGTH, **settings) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        check_drafted(llm)
        assert llm.stats().spec_accepted_tokens > 100
    compared = 0
    for output, (want, leads) in zip(outputs, oracle(), strict=True):
        # Behind a tie of the last digits either text is right; there are few, if any.
        tie = next((i for i, lead in enumerate(leads) if lead < 1e-4), NEW)
        assert output.outputs[0].token_ids[:tie] == want[:tie]
        assert len(output.outputs[0].token_ids) == NEW
        compared += tie
    assert compared > 0.9 * len(prompts()) * NEW


SEEDED = [
    dict(temperature=0.9, seed=1),
    dict(temperature=0.7, seed=2, top_p=0.8, repetition_penalty=1.2),
    dict(temperature=1.1, seed=3, top_k=12, frequency_penalty=0.8, presence_penalty=-0.4),
    dict(temperature=0.3, seed=4, min_p=0.1, n=3),
    dict(temperature=0.6, seed=5, min_tokens=20, stop_token_ids=list(range(5, 120)), logprobs=2),
]


@functools.cache
def sampled(method: str, most: int) -> list[list[tuple[list[int], str | None, list[list[float]]]]]:
    """Tokens, ends and log-probabilities of all choices of all requests."""
    params = [SamplingParams(max_tokens=40, detokenize=False, **given) for given in SEEDED]
    asked = [tiny.PROMPTS[i % 2] * (1 + 2 * (i % 2 == 0)) for i in range(len(params))]
    with drafted(method, most) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        if most:
            check_drafted(llm)
    return [
        [
            (c.token_ids, c.finish_reason, [[lp.logprob for lp in e.values()] for e in c.logprobs or ()])
            for c in output.outputs
        ]
        for output in outputs
    ]


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_seeded_answers_are_the_same_at_any_draft_length(method: str, most: int):
    plain = sampled("nothing", 0)
    for choices, wanted in zip(sampled(method, most), plain, strict=True):
        for (tokens, end, logprobs), (want, other, reference) in zip(choices, wanted, strict=True):
            assert (tokens, end) == (want, other)
            assert len(logprobs) == len(reference)
            for entry, one in zip(logprobs, reference, strict=True):
                assert entry == pytest.approx(one, abs=1e-3)
    assert sum(len(entries) for *_, entries in plain[4]) >= 20


@pytest.mark.parametrize("method", METHODS)
def test_contexts_end_at_their_last_token(method: str):
    """Requests that fill the context, from every distance that drafts can overshoot it by."""
    length = 64
    asked = [(tiny.PROMPTS[1] * 2)[: length - left] for left in range(1, 13)]
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
    answers = []
    for most in (0, 5):
        with drafted(method, most, max_model_len=length) as llm:
            answers.append(llm.generate(asked, params, use_tqdm=False))
            if most:
                assert llm.stats().spec_draft_tokens > 0
    for plain, output, prompt in zip(*answers, asked, strict=True):
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert len(prompt) + len(output.outputs[0].token_ids) == length
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("longest", [24, 60, 61])
def test_a_draft_of_a_shorter_context_drafts_as_far_as_it_can(longest: int, stated: bool):
    """Requests begin within the draft's context (its own, or `max_model_len`) and go on beyond it, or begin
    beyond it."""
    params = GREEDY.clone(max_tokens=60)
    with drafted("draft_model", 0) as llm:
        plain = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
    given = config("draft_model", 4, max_model_len=longest) if stated else config("draft_model", 4, longest)
    with make("llama", speculative_config=given) as llm:
        outputs = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
        stats = llm.stats()
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    # The shortest prompt alone begins far within; its drafts end where the draft's positions do.
    assert 0 < stats.spec_draft_tokens <= 4 * 60 + 4 * 20


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drafts_under_a_tiny_cache_preempt_no_more_than_no_drafts(method: str):
    """Drafts' KV lies in what the target's pool has left: little is drafted there, and nobody is preempted
    for it. Over several loads: who is preempted in one of them is chance."""
    settings: dict[str, Any] = dict(block_size=8, look_ahead_admission=False, enable_prefix_caching=False)
    loads = [[(tiny.PROMPTS[(i + k) % 2] * 2)[i * (k + 1) % 11 :] for i in range(12)] for k in range(4)]
    params, answers, preempted = GREEDY.clone(max_tokens=70), [], []
    for most in (4, 0):
        with drafted(method, most, **settings, kv_cache_memory_bytes=420 << 10) as llm:
            outputs = [out for asked in loads for out in llm.generate(asked, params, use_tqdm=False)]
            stats = llm.stats()
            assert (stats.spec_draft_tokens > 0) == (most > 0)
        answers.append([out.outputs[0].token_ids for out in outputs])
        preempted.append(stats.num_preemptions)
    assert answers[0] == answers[1]
    assert 0 < preempted[0] <= 1.05 * preempted[1] + 1, preempted
