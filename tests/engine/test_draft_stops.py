"""Drafts that end for lack of confidence: the same tokens, fewer drafts in vain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from octavo import SamplingParams
from octavo.errors import ConfigError
from octavo.speculative.draft_model import DraftModel
from octavo.speculative.eagle3 import Eagle3
from tests import tiny
from tests.engine.speculative_methods import TARGET, config
from tests.engine.test_llm_parity import expected, generate, make
from tests.engine.test_speculative_parity import PARAMS
from tests.tiny import eagle3


def run(method: str, threshold: float | None, adaptive: bool = False, **settings: Any) -> tuple[Any, Any]:
    """Answers to all that requests can ask, and the engine's statistics."""
    given = config(method, 5, adaptive=adaptive, draft_confidence_threshold=threshold)
    params = [SamplingParams(max_tokens=40, detokenize=False, ignore_eos=True, **fields) for fields in PARAMS]
    prompts = [tiny.PROMPTS[i % len(tiny.PROMPTS)] for i in range(len(params))]
    with make(TARGET, speculative_config=given, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[c.token_ids for c in o.outputs] for o in outputs], llm.stats()


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_tokens_stay_and_more_of_the_drafts_stand(method: str):
    plain, without = run(method, 0.0)
    shares = [without.spec_accepted_tokens / without.spec_draft_tokens]
    for threshold in (0.1, 0.4):
        tokens, stats = run(method, threshold)
        assert tokens == plain
        shares.append(stats.spec_accepted_tokens / stats.spec_draft_tokens)
        assert 0 < stats.spec_accepted_tokens <= without.spec_accepted_tokens
    assert 1.3 * shares[0] < shares[1] < shares[2], shares
    assert run(method, 1.0)[1].spec_draft_tokens == 0  # nothing is as sure as that


@pytest.mark.parametrize(
    "settings", [dict(max_num_batched_tokens=7), dict(enforce_eager=True), dict(max_num_seqs=2)]
)
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_greedy_equals_transformers(method: str, settings: dict[str, Any]):
    for threshold, adaptive in ((0.3, False), (None, True)):
        given = config(method, 5, adaptive=adaptive, draft_confidence_threshold=threshold)
        with make(TARGET, speculative_config=given, **settings) as llm:
            for _ in range(2):
                assert generate(llm) == expected(TARGET)
            assert adaptive or llm.stats().spec_draft_tokens > 0


class Watch:
    """Sees all drafts with a threshold: the tokens before each, its tokens, and where it ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[list[int], list[int], int]] = []
        propose, follow = DraftModel.propose, Eagle3.follow

        def proposed(draft: DraftModel, slots: np.ndarray, counts: np.ndarray, *rest: Any):
            out = propose(draft, slots, counts, *rest)
            known = rest[2]
            self.note(draft, slots, counts, known[torch.from_numpy(np.flatnonzero(counts))], out)
            return out

        def followed(head: Eagle3, step: Any, counts: np.ndarray, most: Any, known: torch.Tensor, *rest: Any):
            out = follow(head, step, counts, most, known, *rest)
            self.note(head, step.slots, counts, known, out)
            return out

        monkeypatch.setattr(DraftModel, "propose", proposed)
        monkeypatch.setattr(Eagle3, "follow", followed)

    def note(
        self, drafter: Any, slots: np.ndarray, counts: np.ndarray, known: torch.Tensor, out: Any
    ) -> None:
        if out is None:
            return
        for i, length, made in zip(out.requests.tolist(), known.tolist(), out.made.tolist(), strict=True):
            row = drafter._table[int(slots[i])].tolist()
            passes = min(made + 1, int(counts[i]))
            self.seen.append((row[:length], row[length : length + passes], made))


def test_drafts_end_where_the_draft_s_own_probabilities_say(monkeypatch: pytest.MonkeyPatch):
    """As Transformers computes them."""
    watch, threshold = Watch(monkeypatch), 0.02
    given = config("draft_model", 5, draft_confidence_threshold=threshold)
    with make(TARGET, speculative_config=given) as llm:
        assert generate(llm) == expected(TARGET)
    model = transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    compared = 0
    for known, drafts, made in watch.seen[::3]:
        with torch.no_grad():
            rows = model(torch.tensor([known + drafts[:-1]])).logits[0, -len(drafts) :]
        products = rows.softmax(-1).gather(1, torch.tensor(drafts)[:, None])[:, 0].cumprod(0)
        if (products - threshold).abs().min() < 1e-4:
            continue
        assert made == int((products >= threshold).int().cumprod(0).sum())
        compared += 1
    assert compared > 20 and len({made for *_, made in watch.seen}) > 2


def test_a_head_s_drafts_end_within_what_it_drafts_without(monkeypatch: pytest.MonkeyPatch):
    watch = Watch(monkeypatch)
    given = config("eagle3", 5, draft_confidence_threshold=0.3)
    with make(TARGET, speculative_config=given, enable_prefix_caching=False) as llm:
        assert generate(llm) == expected(TARGET)
    dialect, weights = eagle3.DIALECTS["speculators"], eagle3.weights("speculators", TARGET)
    for known, drafts, made in watch.seen[::4]:
        want, lead = eagle3.drafts(dialect, weights, TARGET, known, 0, len(drafts))
        assert drafts == want or lead < 1e-4
        assert made >= len(drafts) - 1
    assert len({made for *_, made in watch.seen}) > 2


def test_steps_that_do_not_wait_for_drafts_are_refused_with_a_threshold():
    given = config("draft_model", 5, draft_confidence_threshold=0.3)
    with pytest.raises(ConfigError, match="async_scheduling=False"):
        make(TARGET, speculative_config=given, async_scheduling=True)
    with pytest.raises(ConfigError, match="has no draft_confidence_threshold"):
        make(TARGET, speculative_config={"method": "ngram", "draft_confidence_threshold": 0.3})
