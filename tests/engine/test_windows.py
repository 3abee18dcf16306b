"""Requests whose KV groups have sliding windows, over the pretend model and over the scheduler alone."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from octavo.engine.core import EngineCore
from octavo.step_messages import StepResult
from tests.engine.simulation import expected, make_core, request, run, tokens_of


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 40])
@pytest.mark.parametrize("windows", [(1,), (5,), (8, None), (None, 50, 3), (16, 9, None, 1)], ids=str)
def test_tokens_and_prefix_hits_with_windows(windows, budget, overlap):
    core = make_core(300, windows=windows, async_scheduling=overlap, max_num_batched_tokens=budget)
    prompts = [prompt_of(length, length) for length in (1, 8, 17, 60)]
    for round_ in range(2):
        for i, prompt in enumerate(prompts):
            core.add(request(f"{round_}-{i}", prompt, 20))
        outputs = run(core)
        for i, prompt in enumerate(prompts):
            news = outputs[f"{round_}-{i}"]
            assert tokens_of(news) == expected(prompt, 20)
            # Nothing was lost meanwhile, so all groups agree on the whole prompt.
            assert news[-1].num_cached_tokens == round_ * ((len(prompt) - 1) // 8 * 8)
    assert core.stats().kv_blocks_used == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(None, 12), (20, 3), (None, 8, 8, 1)], ids=str)
def test_preemption_changes_no_token(windows, overlap):
    core = make_core(windows=windows, async_scheduling=overlap, num_blocks=14 + 4 * len(windows))
    prompts = [prompt_of(length, length) for length in (10, 25, 14, 30, 22, 16)]
    # Together they lack blocks for windows too, not only for what is kept whole.
    assert all(len(p) + 60 - 1 <= core.facts.kv_capacity for p in prompts)
    for i, prompt in enumerate(prompts):
        core.add(request(str(i), prompt, 60))
    outputs = run(core)
    for i, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(i)]) == expected(prompt, 60)
    assert core.stats().num_preemptions > 0 or None not in windows


@pytest.mark.parametrize("budget", [1, 5, 64])
@pytest.mark.parametrize("windows", [(5,), (None, 9), (None, None, 20), (30, 2, None)], ids=str)
def test_the_longest_context_that_is_promised_goes_through_alone(windows, budget):
    for num_blocks in range(len(windows), 20, 3):
        core = make_core(num_blocks, 80, windows, max_num_batched_tokens=budget)
        capacity = min(core.facts.kv_capacity, 79)  # the last token's KV is never stored
        for length in {1, capacity // 2 + 1, capacity}:
            prompt = prompt_of(length, length)
            name = f"{num_blocks}-{length}"
            count = capacity - length + 1
            core.add(request(name, prompt, count))
            core.add(request(f"{name}-again", prompt, 1))
            outputs = run(core)
            assert tokens_of(outputs[name]) == expected(prompt, count)
            assert tokens_of(outputs[f"{name}-again"]) == expected(prompt, 1)


def test_a_longer_context_than_is_promised_does_not_go_through():
    for windows, num_blocks in [((None,), 4), ((None, 9), 7), ((30, 2), 5)]:
        core = make_core(num_blocks, 100, windows, check_invariants=False)
        capacity = core.facts.kv_capacity
        assert capacity < 99
        core.add(request("a", prompt_of(capacity // 2), capacity - capacity // 2 + 2))
        with pytest.raises(AssertionError, match="not finished"):
            run(core, limit=300)


class Alone:
    """A scheduler whose steps are pretended without a model: fast enough for long contexts."""

    def __init__(self, core: EngineCore):
        self.scheduler, self.pool = core.scheduler, core.kv.pool

    def step(self) -> int:
        """Rows of the next step."""
        step = self.scheduler.schedule()
        assert step is not None
        count = len(step.plan.slots)
        self.scheduler.update(
            step, StepResult(np.full((count, 1), 5, np.int32), step.plan.samples.astype(np.int32))
        )
        return step.plan.total_rows


def test_memory_of_a_long_request_is_bounded_by_its_window():
    window, size, chunk = 100, 16, 256
    core = make_core(
        1000, 11_000, (window,), block_size=size, max_num_batched_tokens=chunk, check_invariants=False
    )
    core.add(request("long", prompt_of(10_000), 900, stream=False))
    alone = Alone(core)
    computed, most = 0, 0
    while core.scheduler.has_requests:
        if computed % 5 == 0:
            core.scheduler.check()
        rows = alone.step()
        computed += rows
        most = max(most, alone.pool.num_used)
        assert alone.pool.num_used <= window // size + -(-rows // size) + 2
    assert computed == 10_899
    assert most == (window - 1 + chunk - 2) // size + 2 - 1  # chunks and blocks are aligned here
    assert alone.pool.num_used == 0


def test_windows_take_a_fraction_of_the_blocks():
    """Five groups of six slide: a long text takes little more than a sixth of what it would."""
    used = {}
    for name, windows in [("full", (None,) * 6), ("mixed", (None, *(64,) * 5))]:
        core = make_core(
            3000, 6000, windows, block_size=16, max_num_batched_tokens=128, check_invariants=False
        )
        core.add(request("long", prompt_of(5000), 100, stream=False))
        alone = Alone(core)
        history = []
        while core.scheduler.has_requests:
            alone.step()
            history.append(alone.pool.num_used)
        used[name] = max(history)
        # At admission a group that keeps the whole context gets it all, windows get their first chunk.
        assert history[0] == (6 * 313 if name == "full" else 313 + 5 * 8)
    assert used["full"] == 6 * 319
    assert used["mixed"] <= 319 + 5 * (64 // 16 + 128 // 16 + 2)


def test_more_requests_run_where_windows_free_blocks():
    running = {}
    for name, windows in [("full", (None, None, None)), ("mixed", (None, 16, 16))]:
        core = make_core(120, 400, windows, max_num_seqs=16, check_invariants=False)
        for i in range(16):
            core.add(request(str(i), prompt_of(40, i), 200))
        alone, seen = Alone(core), []
        for _ in range(150):
            alone.step()
            seen.append(core.stats().num_running)
        core.scheduler.check()
        running[name] = np.mean(seen[50:])
    assert running["mixed"] > 1.8 * running["full"]


def test_a_prompt_gets_fewer_rows_where_blocks_are_short():
    # A window of two blocks, in a pool of eight, of which another request holds up to three.
    core = make_core(8, 200, (16,), max_num_batched_tokens=64, enable_prefix_caching=False)
    core.add(request("small", [1, 2, 3], 60, stream=False))
    core.step()
    prompt = prompt_of(120)
    core.add(request("long", prompt, 5))
    outputs = run(core)
    assert tokens_of(outputs["long"]) == expected(prompt, 5)
    assert tokens_of(outputs["small"]) == expected([1, 2, 3], 60)
    assert core.stats().num_preemptions == 0
    chunks = [int(n) for plan in core.executor.plans for n in plan.num_rows if n > 1][1:]
    assert sum(chunks) >= 119
    assert max(chunks) <= 48
    # It did not wait for the other one to end.
    assert len(core.executor.plans) < 70


@pytest.mark.parametrize("steps_before", [0, 1])
def test_rows_that_nobody_else_took_get_their_blocks(steps_before):
    """In every second step of one row, it is left for those who wait; if they can't come, it goes back."""
    core = make_core(
        8, windows=(16,), max_num_batched_tokens=1, check_invariants=False, enable_prefix_caching=False
    )
    for i in range(steps_before):
        core.add(request(f"before-{i}", [1], 1))
        run(core)
    prompts = {name: prompt_of(60, i) for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        core.add(request(name, prompt, 3, stream=False))
    while core.stats().num_running < 2:
        core.step()
    elsewhere = core.kv.pool.allocate(core.kv.pool.num_free)  # as by a transfer
    steps = core.stats().num_steps
    for _ in range(10):
        core.step()
    assert core.stats().num_steps == steps + 10
    assert core.stats().num_preemptions == 1
    core.kv.pool.release(elsewhere)
    outputs = run(core)
    assert {name: tokens_of(outputs[name]) for name in prompts} == {
        name: expected(prompt, 3) for name, prompt in prompts.items()
    }


@pytest.mark.parametrize("late", [False, True])
def test_blocks_that_passed_while_a_step_failed_are_not_found(late):
    """Steps in flight free blocks whose keys come from a step that fails afterwards."""
    core = make_core(60, windows=(8, None), max_num_batched_tokens=16, async_scheduling=late)
    prompt = prompt_of(90)
    core.executor.fail_at = 3
    core.add(request("a", prompt))
    assert run(core)["a"][-1].finish_reason == "error"
    core.executor.fail_at = None
    core.add(request("b", prompt, 5))
    again = run(core)["b"]
    assert again[-1].num_cached_tokens == 48
    assert tokens_of(again) == expected(prompt, 5)


def test_the_next_turn_finds_the_whole_last_one_behind_its_window():
    core = make_core(windows=(None, 10))
    prompt = prompt_of(20)
    core.add(request("a", prompt, 60))
    answer = tokens_of(run(core)["a"])
    core.add(request("b", [*prompt, *answer, 1, 2], 2))
    assert run(core)["b"][-1].num_cached_tokens == 72  # of 79 computed tokens
    # A turn that leaves the text early is found as well: what was freed is still there.
    core.add(request("c", [*prompt, *answer[:30], 7, 7, 7], 2))
    assert run(core)["c"][-1].num_cached_tokens == 48


def test_scheduling_512_requests_with_windows():
    core = make_core(
        512 * 60, 400, (None, 64, 64, 64, 64, 64), max_num_seqs=512, max_num_batched_tokens=8192,
        block_size=16, check_invariants=False, enable_prefix_caching=False,
    )  # fmt: skip
    for i in range(512):
        core.add(request(str(i), [i % 1000] * (90 + i % 16), 250, stream=False))
    alone, times = Alone(core), []
    for _ in range(100):
        begin = time.thread_time()
        rows = alone.step()
        if rows == 512:
            times.append(time.thread_time() - begin)
    assert len(times) > 60
    print(f"median with 512 running in 6 groups: {np.median(times) * 1e6:.0f} µs")
    assert np.median(times) < 5e-3
