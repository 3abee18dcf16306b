"""Unseeded sampling with drafts has the model's distribution: counts of whole answers against Transformers'
probabilities, by Pearson's chi-square test."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from octavo import SamplingParams
from tests import tiny
from tests.engine.test_llm_parity import make
from tests.tiny import eagle3, pard

VARIANT, DRAFT = "llama", "qwen2"
ALPHABET = (7, 8, 9)
LENGTH, SAMPLES = 4, 2000
# Every pair of tokens stands in it, so that there is something to draft whatever comes.
PROMPT = [7, 7, 8, 8, 9, 9, 7, 9, 8, 7, 7, 9, 7, 8, 9, 8, 8, 7]
PENALTIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": dict(frequency_penalty=0.7, presence_penalty=-0.5, repetition_penalty=1.2),
}
METHODS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ngram": dict(method="ngram", prompt_lookup_min=1),
    "suffix": dict(method="suffix"),
    "draft_model": dict(method="draft_model"),
    "eagle3": dict(method="eagle3"),
    "pard": dict(method="pard"),
}


@functools.cache
def probabilities(penalties: str, temperature: float = 1.5) -> dict[tuple[int, ...], float]:
    """Of every answer, from the definition: Transformers' logits, changed by what came before."""
    given = PENALTIES[penalties]
    odds = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for answer, probability in odds.items():
            logits = tiny.logits(VARIANT, [*PROMPT, *answer])[-1].double()
            for token in ALPHABET:
                if token in PROMPT or token in answer:
                    factor = given.get("repetition_penalty", 1.0)
                    logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
                logits[token] -= given.get("frequency_penalty", 0.0) * answer.count(token)
                logits[token] -= given.get("presence_penalty", 0.0) * (token in answer)
            some = (logits[list(ALPHABET)] / temperature).softmax(0)
            for token, share in zip(ALPHABET, some.tolist(), strict=True):
                longer[(*answer, token)] = probability * share
        odds = longer
    return odds


def p_value(counts: dict[tuple[int, ...], int], odds: dict[tuple[int, ...], float]) -> float:
    """Of these counts or less likely ones, if the probabilities are these; rare answers count together."""
    total = sum(counts.values())
    observed, wanted = [0.0], [0.0]
    for answer, share in odds.items():
        if share * total < 5:
            observed[0] += counts.get(answer, 0)
            wanted[0] += share * total
        else:
            observed.append(counts.get(answer, 0))
            wanted.append(share * total)
    if wanted[0] < 5:
        observed[1:2], wanted[1:2] = [observed[0] + observed[1]], [wanted[0] + wanted[1]]
        del observed[0], wanted[0]
    seen, due = torch.tensor(observed).double(), torch.tensor(wanted).double()
    chi = ((seen - due) ** 2 / due).sum()
    freedom = torch.tensor(len(due) - 1.0).double()
    return float(torch.special.gammaincc(freedom / 2, chi / 2))


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_as_frequent_as_they_are_likely(method: str):
    settings: dict[str, Any] = {}
    if method != "nothing":
        config = dict(METHODS[method], num_speculative_tokens=2, adaptive=False)
        if method == "draft_model":
            config["model"] = str(tiny.checkpoint(DRAFT))
        if method == "eagle3":
            config["model"] = str(eagle3.head("speculators", VARIANT))
        if method == "pard":
            config["model"] = str(pard.checkpoint(DRAFT))
        settings["speculative_config"] = config
    with make(VARIANT, max_num_seqs=32, check_invariants=False, **settings) as llm:
        for penalties, given in PENALTIES.items():
            params = SamplingParams(
                temperature=1.5, max_tokens=LENGTH, allowed_token_ids=list(ALPHABET), ignore_eos=True,
                detokenize=False, n=50, **given,
            )  # fmt: skip
            outputs = llm.generate([PROMPT] * (SAMPLES // 50), params, use_tqdm=False)
            counts: dict[tuple[int, ...], int] = {}
            for choice in itertools.chain.from_iterable(output.outputs for output in outputs):
                answer = tuple(choice.token_ids)
                counts[answer] = counts.get(answer, 0) + 1
            assert sum(counts.values()) == SAMPLES and counts.keys() <= probabilities(penalties).keys()
            assert p_value(counts, probabilities(penalties)) > 1e-4
            # The test would notice: these are not the counts of the other distribution.
            other = next(name for name in PENALTIES if name != penalties)
            assert p_value(counts, probabilities(other)) < 1e-6
        stats = llm.stats()
    if method != "nothing":
        assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
        assert stats.spec_draft_tokens > SAMPLES
