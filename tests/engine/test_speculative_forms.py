"""Structured output with drafts: masks of every row, and the same text as without drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine import core as core_module
from octavo.sampling_params import StructuredOutputsParams
from octavo.speculative.proposer import HostProposer, Proposal

PROMPT = "Describe a person as JSON."
FORMS = [
    dict(json={"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
         "age": {"type": "integer", "minimum": 0, "maximum": 130}, "tags": {"type": "array",
         "items": {"enum": ["a", "b"]}, "maxItems": 3}}, "required": ["name", "age", "tags"],
         "additionalProperties": False}),
    dict(regex=r"[a-c]{4}-\d{3}"),
    dict(choice=["positive", "negative", "neither of the two"]),
    dict(grammar='start: "x" ("+" "x")* ";"'),
]  # fmt: skip


class Replaying(HostProposer):
    """Drafts known answers; every third draft has a token that is wrong, or that no form allows."""

    def __init__(self) -> None:
        self.answers: list[list[int]] = []
        self._count = 0

    def propose(self, slot: int, tokens: np.ndarray, most: int) -> Proposal:
        known = tokens.tolist()
        answer = next((a for a in self.answers if a[: len(known)] == known), known)
        draft = answer[len(known) : len(known) + most]
        self._count += 1
        if draft and self._count % 3 == 0:
            draft[self._count % len(draft)] = self._count % 500
        return Proposal(np.array(draft, np.int32), 0)


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Replaying:
    proposer = Replaying()
    monkeypatch.setattr(core_module, "make_host_proposer", lambda config: proposer)
    return proposer


def test_same_texts_as_without_drafts(replaying: Replaying):
    params = [
        SamplingParams(
            temperature=t, seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(**form)
        )
        for form in FORMS
        for t in (0.0, 0.9)
    ]
    settings = dict(max_model_len=256, dtype="float32", quantization="none", check_invariants=True)
    with LLM(**settings) as llm:
        plain = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    replaying.answers = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    config = {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False}
    with LLM(**settings, speculative_config=config) as llm:
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        stats = llm.stats()
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
    assert stats.spec_accepted_tokens > 2 * stats.spec_drafts
    for output, other in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        assert output.outputs[0].finish_reason == other.outputs[0].finish_reason
    for output in outputs[:2]:
        if output.outputs[0].finish_reason == "stop":
            assert json.loads(output.outputs[0].text)["tags"] is not None
