"""Steps that judge drafts, and drafts, in recorded steps, which are stood in for by a replay on the CPU; real
ones run in tests/gpu. What is drafted is what is drafted eagerly, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import SamplingParams
from tests import tiny
from tests.engine.speculative_methods import METHODS, check_drafted, drafted
from tests.engine.test_eagle3 import Watch
from tests.engine.test_llm_parity import expected, generate
from tests.worker.pretended_graphs import Recordings, pretend_graphs

WORKER = ["draft_model", "pard", "eagle3"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    return pretend_graphs(monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_plain_decoding(method: str, recorded: Recordings):
    settings: dict[str, Any] = dict(async_scheduling=method in WORKER)
    with drafted(method, **settings) as llm:
        for _ in range(2):
            assert generate(llm) == expected("llama")
        check_drafted(llm)
    assert max(padding.most for padding in recorded.steps) == 5
    assert len(set(recorded.steps)) == len(recorded.steps)
    assert bool(recorded.works) == (method in WORKER)
    assert len(set(recorded.works)) == len(recorded.works)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("method", WORKER)
def test_as_many_drafts_stand_as_of_those_made_eagerly(method: str, draws: bool):
    params = [
        SamplingParams(temperature=0.8 * draws, seed=5 + i, max_tokens=40, ignore_eos=True, detokenize=False)
        for i in range(len(tiny.PROMPTS))
    ]
    found = []
    for graphs in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            recorded = pretend_graphs(patch) if graphs else None
            with drafted(method, async_scheduling=True) as llm:
                outputs = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
                stats = llm.stats()
            found.append(
                ([o.outputs[0].token_ids for o in outputs], stats.spec_drafts, stats.spec_accepted_per_pos)
            )
            if recorded is not None:
                assert any(key[0] in ("chain", "at once") for key in recorded.works)
    assert found[0] == found[1]
    assert sum(found[0][2]) > 0


@pytest.mark.parametrize("head", ["speculators", "specforge"])
def test_drafts_of_a_head_equal_the_plain_implementation(
    head: str, recorded: Recordings, monkeypatch: pytest.MonkeyPatch
):
    from tests.engine.test_eagle3 import drafted as with_head

    watch = Watch(monkeypatch)
    with with_head("llama", head, async_scheduling=True) as llm:
        assert generate(llm) == expected("llama")
    assert any(key[0] == "follow" for key in recorded.works)
    watch.check(head, "llama", every=5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=7),
        dict(kv_cache_memory_bytes=220 << 10, block_size=8, look_ahead_admission=False, max_num_seqs=3),
    ],
)
@pytest.mark.parametrize("method", WORKER)
def test_chunks_and_preemption(method: str, settings: dict[str, Any], recorded: Recordings):
    with drafted(method, async_scheduling=True, **settings) as llm:
        for _ in range(2):
            assert generate(llm) == expected("llama")
        check_drafted(llm)
        assert ("kv_cache_memory_bytes" in settings) == (llm.stats().num_preemptions > 0)
    assert any(padding.most > 1 for padding in recorded.steps)


def test_some_draw_and_some_are_greedy_beside_what_is_penalized(recorded: Recordings):
    """Settings that recorded drafts do not mind: the verifier does."""
    settings: list[dict[str, Any]] = [
        dict(temperature=0.0), dict(temperature=0.9, seed=3), dict(temperature=0.9, seed=4, top_k=5),
        dict(temperature=0.0, repetition_penalty=1.3), dict(temperature=0.0, logprobs=2),
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False, **one) for one in settings]
    prompts = [tiny.PROMPTS[i % 3] for i in range(len(params))]
    tokens = []
    for most in (0, 3):
        with drafted("eagle3", most, async_scheduling=True) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([o.outputs[0].token_ids for o in outputs])
    assert tokens[0] == tokens[1]
    assert any(key[-1] is True for key in recorded.works if key[0] == "chain")
