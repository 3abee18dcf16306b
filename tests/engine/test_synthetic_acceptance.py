"""Every method with synthetic acceptance: drafts stand as often as was asked, and all outputs say so."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from tests import tiny
from tests.engine import speculative_methods
from tests.engine.test_llm_parity import GREEDY, expected, generate, make

RATES = [0.8, 0.6, 0.4]
# In which there is something to find for look-ups, whatever comes.
PROMPT = [token for token in range(5, 90) for _ in range(2)]


def config(method: str, **more: Any) -> dict[str, Any]:
    return speculative_methods.config(method, len(RATES), **{"synthetic_acceptance": RATES, **more})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", speculative_methods.METHODS)
def test_drafts_stand_as_often_as_asked(method: str, overlap: bool, caplog: pytest.LogCaptureFixture):
    params = SamplingParams(temperature=0.0, seed=3, max_tokens=60, ignore_eos=True, detokenize=False, n=8)
    settings: dict[str, Any] = dict(speculative_config=config(method), async_scheduling=overlap)
    settings |= dict(max_model_len=None, enable_prefix_caching=False)  # else a head's context differs
    with caplog.at_level(logging.INFO), make("llama", **settings) as llm:
        first, again = (llm.generate([PROMPT], params, use_tqdm=False)[0] for _ in range(2))
        llm.generate([PROMPT] * 8, params.clone(seed=None), use_tqdm=False)
        stats = llm.stats()
    assert "synthetic acceptance of drafts is on (0.8,0.6,0.4)" in caplog.text
    assert "SYNTHETIC acceptance 0.8,0.6,0.4" in caplog.text
    assert first.synthetic_acceptance == RATES
    if method != "suffix":  # which drafts otherwise once there are outputs
        assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    by_place = np.array(stats.spec_accepted_per_pos)
    if method not in ("ngram", "suffix"):  # which draft all that was asked, up to a request's end
        tried = np.array([stats.spec_drafts, *by_place[:-1]])
        assert np.all(np.abs(by_place / tried - RATES) < 4 * np.sqrt(0.25 / tried) + 0.02)
    else:
        assert abs(by_place[0] / stats.spec_drafts - RATES[0]) < 4 * np.sqrt(0.25 / stats.spec_drafts)
    assert stats.spec_drafts > 300


def test_nothing_is_marked_otherwise_and_adaptive_drafts_stop_where_none_stand():
    with make("llama", speculative_config={"method": "ngram"}) as llm:
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].synthetic_acceptance is None
    # None ever stands, so that what comes is the model's own.
    never = config("draft_model", synthetic_acceptance=[0.0] * 3)
    with make("llama", speculative_config=never) as llm:
        assert generate(llm) == expected("llama")
        assert llm.stats().spec_accepted_tokens == 0 < llm.stats().spec_drafts


def test_the_setting_goes_with_a_draft_model():
    """Given beside `speculative_config`, it is the engine's alone: a draft model's settings draft nothing."""
    plain = speculative_methods.config("draft_model", len(RATES))
    with make("llama", speculative_config=plain, speculative_synthetic_acceptance="0.8,0.6,0.4") as llm:
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].synthetic_acceptance == RATES


def test_streams_are_marked_too():
    import asyncio

    from octavo.async_llm import AsyncLLM
    from octavo.config import EngineConfig

    async def marks() -> set[tuple[float, ...]]:
        settings = EngineConfig(
            model=str(tiny.checkpoint("llama")), dtype="float32", skip_tokenizer_init=True,
            max_model_len=tiny.CONTEXT, kv_cache_memory_bytes=8 << 20, speculative_config=config("ngram"),
        )  # fmt: skip
        async with await AsyncLLM.create(settings) as engine:
            return {
                tuple(out.synthetic_acceptance or ())
                async for out in engine.generate({"prompt_token_ids": tiny.PROMPTS[0]}, GREEDY)
            }

    assert asyncio.run(marks()) == {tuple(RATES)}


def test_llm_takes_the_flag_too():
    with make("llama", speculative_config={"method": "ngram"}, speculative_synthetic_acceptance="0.5") as llm:
        assert isinstance(llm, LLM) and llm.config.synthetic_acceptance == [0.5]
        assert "SYNTHETIC acceptance 0.5" in llm.facts.summary["speculation"]
