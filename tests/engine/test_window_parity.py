"""Models with sliding windows against Transformers in float32, through the whole engine."""

from __future__ import annotations

import pytest

from octavo.kv.groups import page_bytes
from tests import tiny
from tests.engine.test_llm_parity import GREEDY, expected, make

# Three layers that slide are one group; of three of which one keeps the whole context, each is a group.
# With it the bytes of a page's token, and tokens of a pool in which the requests below don't fit together.
POOLS = {"mistral-window": (3 * 2 * 2 * 32 * 4, 64), "qwen2-window": (2 * 2 * 16 * 4, 336)}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("variant", POOLS)
def test_preemption_and_prefix_hits(variant, block_size, chunk, overlap):
    token_bytes, pool = POOLS[variant]
    settings = dict(
        max_num_batched_tokens=chunk, block_size=block_size, async_scheduling=overlap,
        look_ahead_admission=False,
    )  # fmt: skip
    numbers = [2, 1, 0, 0, 0]
    prompts, want = [tiny.PROMPTS[i] for i in numbers], [expected(variant)[i] for i in numbers]
    with make(variant, kv_cache_memory_bytes=pool * token_bytes, **settings) as llm:
        assert page_bytes(llm.facts.groups) == token_bytes * block_size
        assert llm.facts.num_blocks * block_size == pool
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == want
        assert llm.stats().num_preemptions > 0
        short = GREEDY.clone(max_tokens=4)
        hits = [llm.generate([tiny.PROMPTS[1]], short, use_tqdm=False)[0] for _ in range(2)][1]
        assert hits.num_cached_tokens == 40 // block_size * block_size
        assert hits.outputs[0].token_ids == expected(variant)[1][:4]
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.parametrize("variant", POOLS)
def test_hits_reach_as_far_as_without_windows(variant):
    with make(variant, block_size=8) as llm:
        assert len(llm.facts.groups) == (1 if variant == "mistral-window" else 3)
        for cached in (False, True):
            outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == expected(variant)
            want = [(len(p) - 1) // 8 * 8 if cached else 0 for p in tiny.PROMPTS]
            assert [o.num_cached_tokens for o in outputs] == want


def test_a_context_that_no_cache_could_hold_whole():
    """Blocks for 80 tokens, of which window and chunk need 48; the context has 164."""
    token_bytes, _ = POOLS["mistral-window"]
    with make("mistral-window", kv_cache_memory_bytes=80 * token_bytes, max_num_batched_tokens=16) as llm:
        assert llm.facts.num_blocks == 5
        assert llm.facts.kv_capacity == tiny.CONTEXT
        output = llm.generate([tiny.PROMPTS[2]], GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == expected("mistral-window")[2]
