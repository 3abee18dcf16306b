"""Drafts in pages of the target's pool: lent while there is room, given back first, and no token differs."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine import worker_drafting
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import Scheduler
from tests import tiny
from tests.engine import simulation as sim
from tests.engine.pretend_drafts import Drafting
from tests.engine.speculative_methods import drafted, spoil_free_pages
from tests.engine.test_llm_parity import expected, generate, make
from tests.engine.test_random_mixes import WINDOWS, check_mix, disturb

METHODS = ["draft_model", "pard", "eagle3"]


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages that drafts hold whenever somebody is preempted."""
    seen: list[int] = []
    preempt = Scheduler._preempt

    def watched(self: Scheduler, request: Any) -> None:
        assert self._draft_blocks is not None
        seen.append(self._draft_blocks.num_held)
        preempt(self, request)

    monkeypatch.setattr(Scheduler, "_preempt", watched)
    return seen


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_no_token_differs_where_blocks_are_short(method: str, overlap: bool, given_back: list[int]):
    settings: dict[str, Any] = dict(block_size=8, look_ahead_admission=False, async_scheduling=overlap)
    drafts = []
    for kib in (8192, 280, 220):  # with room for all, for all but their drafts, and for two of three requests
        with drafted(method, kv_cache_memory_bytes=kib << 10, **settings) as llm:
            assert generate(llm) == expected("llama")
            stats = llm.stats()
            assert (stats.num_preemptions > 0) == (kib == 220)
            drafts.append(stats.spec_draft_tokens)
            assert generate(llm, tiny.PROMPTS[:1]) == expected("llama")[:1]
            stats = llm.stats()
            assert (stats.draft_blocks, stats.kv_blocks_used) == (0, 0)
    assert drafts[0] > max(drafts[1:]) and min(drafts) > 0
    assert given_back and not any(given_back), "drafts held blocks when somebody was preempted"


@pytest.mark.parametrize(
    ("method", "settings", "backend"),
    [
        ("draft_model", {}, "cpu"),
        ("draft_model", {}, "torch"),
        ("pard", dict(kv_cache_dtype="fp8"), "cpu"),
        ("eagle3", dict(kv_cache_dtype="int8"), "cpu"),
        ("eagle3", dict(kv_cache_dtype="fp8"), "torch"),
    ],
)
def test_what_lay_in_a_page_before_does_not_matter(
    method: str, settings: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
):
    """Free blocks that nobody can find are overwritten with what is NaN in every dtype before each step."""
    spoilt = spoil_free_pages(monkeypatch)
    rest = dict(attention_backend=backend, block_size=8, enable_prefix_caching=False, **settings)
    with make("llama", kv_cache_memory_bytes=8 << 20, **rest) as llm:
        plain = generate(llm)
    with drafted(method, kv_cache_memory_bytes=200 << 10, **rest) as llm:
        for _ in range(2):
            assert generate(llm) == plain
        assert llm.stats().spec_accepted_tokens > 0
    assert sum(spoilt) > 100


@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_windows_over_pages_that_drafts_had(variant: str):
    """What a window has passed is lent to drafts of another shape, beside layers that still see the text."""
    config = {"method": "draft_model", "model": str(tiny.checkpoint("qwen2")), "adaptive": False}
    settings: dict[str, Any] = dict(
        block_size=8, enable_prefix_caching=False, kv_cache_memory_bytes=200 << 10
    )
    with make(variant, speculative_config=config, **settings) as llm:
        for _ in range(2):
            assert generate(llm) == expected(variant)
        assert llm.stats().spec_draft_tokens > 0


# ---- over the pretend model ---------------------------------------------------------------------


def pretend(
    draw: random.Random,
    num_blocks: int,
    *model: Any,
    shape: tuple[int, int] = (1, 1),
    most: int = 2,
    right: float = 0.9,
    **settings: Any,
) -> tuple[EngineCore, Drafting]:
    """A core whose pretend draft has one head of `shape[0]` in `shape[1]` layers; `model` as
    `PretendExecutor` takes it."""
    speculative = {"method": "draft_model", "model": "pretend", "num_speculative_tokens": most}
    config = EngineConfig(
        check_invariants=True, speculative_config={**speculative, "adaptive": False}, **settings
    )
    executor = Drafting(config, num_blocks, 60, *model, shape=shape, draw=draw, right=right)
    return EngineCore(config, executor), executor


def _mixed(seed: int) -> tuple[EngineCore, Drafting]:
    """A mix as `test_random_mix` makes, with drafts that overwrite what lies in the pages they hold."""
    draw = random.Random(seed)
    windows, host = draw.choice(WINDOWS), draw.choice([0, 0, 5, 20])
    caching = draw.random() < 0.75
    blocks = draw.choice([8, 10, 14, 20]) * len(windows) + 8
    core, executor = pretend(
        draw, blocks, windows, host, host > 0 and caching,
        shape=(draw.choice([1, 1, 2, 3]), draw.choice([1, 2])),
        most=draw.randint(1, 6),
        right=draw.choice([0.5, 0.95]),
        block_size=8,
        max_num_seqs=draw.choice([2, 4, 8]),
        max_num_batched_tokens=draw.choice([7, 16, 64]),
        async_scheduling=draw.random() < 0.5,
        scheduling_policy=draw.choice(["fcfs", "priority"]),
        enable_prefix_caching=caching,
        look_ahead_admission=draw.random() < 0.3,
    )  # fmt: skip
    disturb(draw, executor)
    check_mix(draw, core)
    assert core.stats().draft_blocks == 0
    return core, executor


@pytest.mark.parametrize("pause", [0, 32])
@pytest.mark.parametrize("part", range(6))
def test_random_mixes_with_drafts(
    part: int, pause: int, monkeypatch: pytest.MonkeyPatch, given_back: list[int]
):
    monkeypatch.setattr(worker_drafting, "_PAUSE", pause)
    monkeypatch.setattr(worker_drafting, "_UNUSED", 8)
    done = [_mixed(seed) for seed in range(10 * part, 10 * part + 10)]
    for seed in range(100 + 10 * part, 110 + 10 * part):
        if given_back:
            break
        done.append(_mixed(seed))
    assert given_back and not any(given_back), "drafts held blocks when somebody was preempted"
    stats = [core.stats() for core, _ in done]
    assert pause or sum(s.draft_blocks_given_back for s in stats) > 0
    assert 0 < sum(s.spec_accepted_tokens for s in stats) < sum(s.spec_draft_tokens for s in stats)
    assert sum(executor.num_caught_up for _, executor in done) > 5  # behind a text that was there before


def test_requests_that_wait_get_blocks_that_drafts_hold():
    """Beyond what drafts keep while they are made; that, too, before anybody is preempted."""
    settings: dict[str, Any] = dict(
        block_size=8, max_num_seqs=4, max_num_batched_tokens=64, look_ahead_admission=False
    )
    core, _ = pretend(random.Random(3), 20, shape=(1, 2), **settings)  # 2 pages for a draft block
    told: dict[str, list[int]] = defaultdict(list)

    def step() -> None:
        for output in core.step():
            told[output.request_id] += output.new_token_ids

    def drafting(name: str, length: int, max_tokens: int) -> int:
        core.add(sim.request(name, list(range(length)), max_tokens=max_tokens))
        for _ in range(3):
            step()
        stats = core.stats()
        assert stats.num_waiting == stats.num_preemptions == 0
        return stats.draft_blocks

    assert drafting("a", 40, 18) == 12 and core.stats().kv_blocks_used == 6 + 12
    # Drafts may keep 3 of 20 blocks; this one needs 4, and 2 are left.
    assert drafting("b", 32, 20) == 0
    assert core.stats().draft_blocks_given_back == 12
    while core.has_work:
        step()
    for name, length, count in (("a", 40, 18), ("b", 32, 20)):
        assert told[name] == sim.expected(list(range(length)), count)
    assert core.stats().num_preemptions == 0


def test_requests_that_wait_get_blocks_in_which_nobody_drafts_any_more(monkeypatch: pytest.MonkeyPatch):
    """Nobody leaves, and no block comes free by itself."""
    monkeypatch.setattr(worker_drafting, "_IDLE", 4)
    settings: dict[str, Any] = dict(
        block_size=8, max_num_seqs=4, max_num_batched_tokens=64, look_ahead_admission=False
    )
    core, _ = pretend(random.Random(3), 20, shape=(1, 2), **settings)  # 2 pages for a draft block
    blocks, drafting = core.scheduler._draft_blocks, core.scheduler.drafting
    assert blocks is not None and drafting is not None
    blocks.kept = 20
    core.add(sim.request("a", list(range(26)), max_tokens=34))
    for _ in range(4):
        core.step()
    core.add(sim.request("b", list(range(100, 148)), max_tokens=12))
    core.step()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.draft_blocks_given_back) == (1, 1, 0)
    assert stats.draft_blocks >= 8
    monkeypatch.setattr(type(drafting), "_choose", lambda self, slots, able, known, others: 0 * known)
    for _ in range(4 + 16):
        core.step()
        if core.stats().num_running == 2:
            break
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (2, 0, 0)
    assert stats.draft_blocks_given_back >= 8
