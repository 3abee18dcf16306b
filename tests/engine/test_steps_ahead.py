"""More steps under way than one, as on GPUs with ranks: the same tokens, whatever ends or is preempted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo import SamplingParams, StructuredOutputsParams
from octavo.engine.core import EngineCore
from tests import tiny
from tests.engine.test_llm_parity import GREEDY, expected, generate, make
from tests.parallel.thread_executor import thread_ranks  # noqa: F401 (a fixture)


@pytest.fixture(params=[2, 3])
def ahead(request, monkeypatch) -> list[int]:
    """Engines have so many steps under way while they plan the next one; the numbers that there were."""
    monkeypatch.setattr(EngineCore, "_steps_ahead", lambda self: request.param)
    seen: list[int] = []
    take_in = EngineCore._take_in_oldest

    def watch(self: EngineCore) -> Any:
        seen.append(len(self._in_flight))
        return take_in(self)

    monkeypatch.setattr(EngineCore, "_take_in_oldest", watch)
    yield seen
    assert max(seen) == request.param + 1


@pytest.mark.parametrize("chunk", [7, 64])
def test_parity_and_cached_blocks(ahead, chunk):
    with make("qwen3", async_scheduling=True, max_num_batched_tokens=chunk, block_size=8) as llm:
        assert generate(llm) == expected("qwen3")
        assert generate(llm) == expected("qwen3")
        assert llm.stats().prefix_cache_hits > 0


def test_ends_and_slots_that_change_hands(ahead):
    """Four slots for twelve requests, which end by a token that nobody foresees, or by their length."""
    whole = expected("llama")
    stops = [tokens[5 + 3 * i] for i, tokens in enumerate(whole)]
    params = []
    for i in range(12):
        stop = stops[i % 3] if i % 2 else None
        params.append(GREEDY.clone(max_tokens=2 + 2 * i, stop_token_ids=None if stop is None else [stop]))
    with make("llama", async_scheduling=True, max_num_seqs=4, block_size=8) as llm:
        outputs = llm.generate([tiny.PROMPTS[i % 3] for i in range(12)], params, use_tqdm=False)
    for i, output in enumerate(outputs):
        want = whole[i % 3][: 2 + 2 * i]
        if i % 2 and stops[i % 3] in want:
            want = want[: want.index(stops[i % 3]) + 1]
        assert output.outputs[0].token_ids == want


def test_preempted_requests(ahead):
    settings = dict(async_scheduling=True, block_size=8, look_ahead_admission=False, max_num_seqs=8)
    with make("llama", kv_cache_memory_bytes=160 << 10, **settings) as llm:
        outputs = llm.generate([tiny.PROMPTS[i % 3] for i in range(8)], GREEDY, use_tqdm=False)
        assert llm.stats().num_preemptions > 0
    assert [o.outputs[0].token_ids for o in outputs] == [expected("llama")[i % 3] for i in range(8)]


def test_what_depends_on_known_tokens(ahead):
    """Penalties, least lengths and forms, beside a greedy request."""
    params = [
        SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.3, max_tokens=20, detokenize=False),
        GREEDY,
        SamplingParams(temperature=0.0, max_tokens=20, min_tokens=9, logprobs=2, detokenize=False),
    ]
    found = []
    for overlap in (False, True):
        with make("llama", async_scheduling=overlap) as llm:
            outputs = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
            found.append([o.outputs[0].token_ids for o in outputs])
        if not overlap:
            ahead.clear()
    assert found[0] == found[1] and found[0][1] == expected("llama")[1]


def test_forms(ahead):
    """Masks follow the tokens before them: steps with forms wait for these, whatever is under way."""
    form = StructuredOutputsParams(regex=r"[a-f]{3,9}-[0-9]{4}")
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=1, max_tokens=40, structured_outputs=form),
        GREEDY.clone(max_tokens=8),
    ]
    with make("llama", async_scheduling=True, skip_tokenizer_init=False) as llm:
        outputs = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == expected("llama")[0]
    assert outputs[2].outputs[0].token_ids == expected("llama")[2][:8]
    assert outputs[1].outputs[0].finish_reason == "stop"
    assert re.fullmatch(r"[a-f]{3,9}-[0-9]{4}", outputs[1].outputs[0].text)


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("sizes", [dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)])
def test_ranks(ahead, sizes):
    whole = expected("llama")
    params = [GREEDY.clone(max_tokens=3 + 3 * i) for i in range(9)]
    with make("llama", async_scheduling=True, max_num_seqs=4, block_size=8, **sizes) as llm:
        assert generate(llm) == whole
        outputs = llm.generate([tiny.PROMPTS[i % 3] for i in range(9)], params, use_tqdm=False)
    for i, output in enumerate(outputs):
        assert output.outputs[0].token_ids == whole[i % 3][: 3 + 3 * i]
