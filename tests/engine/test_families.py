"""What every family is held to, whole engine against Transformers in float32 (docs/models.md tells of it)."""

from __future__ import annotations

import pytest

from octavo.kv.capacity import request_blocks
from octavo.kv.groups import page_bytes
from tests import tiny
from tests.engine.closeness import bfloat16_errors
from tests.engine.test_llm_parity import expected, generate, make

VARIANTS = sorted(tiny.VARIANTS)
CHUNK = 7


@pytest.mark.proves("chunked prefill", "prefix cache")
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_and_prefix_hits_change_nothing(variant):
    with make(variant, max_num_batched_tokens=CHUNK, block_size=8) as llm:
        assert generate(llm) == expected(variant)
        before = llm.stats().prefix_cache_hits
        assert generate(llm) == expected(variant)  # again, with the prompts' blocks in the cache
        cached = sum((len(prompt) - 1) // 8 * 8 for prompt in tiny.PROMPTS)
        assert llm.stats().prefix_cache_hits - before == cached


@pytest.mark.proves("preemption")
@pytest.mark.parametrize("variant", VARIANTS)
def test_preemption_changes_nothing(variant):
    with make(variant, block_size=8) as llm:
        groups = llm.facts.groups
    # Room for the longest request, and not for all of them.
    longest = max(map(len, tiny.PROMPTS)) + tiny.NEW_TOKENS
    blocks = request_blocks(groups, longest, rows=CHUNK) + len(groups)
    memory = blocks * page_bytes(groups)
    settings = dict(block_size=8, max_num_batched_tokens=64, look_ahead_admission=False)
    with make(variant, kv_cache_memory_bytes=memory, **settings) as llm:
        assert llm.facts.num_blocks == blocks
        assert generate(llm, tiny.PROMPTS[::-1]) == expected(variant)[::-1]
        assert llm.stats().num_preemptions > 0
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_about_as_close_as_transformers(variant):
    """A choice between experts that falls otherwise counts as much as many roundings: hence twice."""
    with make(variant, dtype="bfloat16") as llm:
        rms, rms_theirs = bfloat16_errors(llm, variant, "cpu")
    assert rms <= 2 * rms_theirs
