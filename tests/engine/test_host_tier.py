"""Blocks in host memory and on disk, over the pretend model: preemption, returning prefixes, failures."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.engine.core import EngineCore
from octavo.kv.keys import NO_EXTRAS
from octavo.messages import CoreOutput
from octavo.sampling_params import SamplingParams
from tests.engine import simulation as sim
from tests.engine.simulation import expected, make_core, request, run, tokens_of
from tests.engine.test_random_mixes import Reporting


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(length)] for _ in range(count)]


def answer(core: EngineCore, name: str, prompt: list[int], count: int = 4, **fields) -> CoreOutput:
    """The last output of a request that runs alone; its tokens are right."""
    core.add(request(name, prompt, count, **fields))
    outputs = run(core)[name]
    assert tokens_of(outputs) == expected(prompt, count)
    sim.check_contents(core.kv, core.executor, (None, "A", "B"))
    return outputs[-1]


def crowd_out(core: EngineCore, seed: int = 1) -> None:
    """Fill the device's cache with other texts."""
    for i, prompt in enumerate(prompts(6, 150, seed)):
        core.add(request(f"crowd{seed}-{i}", prompt, 2))
    run(core)


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 20), (None, None, 9), (17,)], ids=str)
def test_a_prefix_that_left_the_device_comes_back_from_the_host(windows, overlap, delay):
    groups = len(windows)
    core = make_core(num_blocks=60 * groups, windows=windows, num_host_blocks=2000, async_scheduling=overlap)
    core.executor.host.delay = lambda: delay
    prompt = prompts(1, 100, 9)[0]
    assert answer(core, "a", prompt).num_cached_tokens == 0
    crowd_out(core)
    crowd_out(core, seed=2)
    before = core.stats()
    assert before.host_blocks_out > 0 and before.host_bytes_out == before.host_blocks_out * 64
    assert answer(core, "b", prompt).num_cached_tokens == 96
    stats = core.stats()
    hits, device_hits = stats.host_cache_hits - before.host_cache_hits, stats.prefix_cache_hits
    assert hits > 0 and hits + device_hits == 96
    assert stats.host_cache_queries - before.host_cache_queries == 100 - device_hits
    assert stats.host_blocks_in > 0 and stats.host_bytes_in == stats.host_blocks_in * 64
    assert stats.kv_blocks_used == 0 and not core.has_work
    assert answer(core, "c", prompt).num_cached_tokens == 96  # loaded blocks are cached on the device
    assert core.stats().host_blocks_in == stats.host_blocks_in


def test_without_a_host_tier_nothing_is_copied():
    core = make_core(num_blocks=60)
    crowd_out(core)
    crowd_out(core, 2)
    assert core.kv.offloading is None and not any(plan.copies for plan in core.executor.plans)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 20)], ids=str)
def test_preempted_requests_resume_by_copying(windows, overlap, caching):
    settings = dict(async_scheduling=overlap, enable_prefix_caching=caching, windows=windows)
    work = prompts(8, 30)
    rows = {}
    for slots in (0, 400):
        core = make_core(num_blocks=24 * len(windows), num_host_blocks=slots, **settings)
        for i, prompt in enumerate(work):
            core.add(request(str(i), prompt, 60))
        outputs = run(core)
        for i, prompt in enumerate(work):
            assert tokens_of(outputs[str(i)]) == expected(prompt, 60)
        stats = core.stats()
        assert stats.num_preemptions > 0
        assert stats.resumed_by_copy + stats.resumed_by_compute == stats.num_preemptions
        rows[slots] = sum(plan.total_rows for plan in core.executor.plans)
        if slots:
            assert stats.resumed_by_copy > stats.num_preemptions / 2 and stats.host_blocks_in > 0
        else:
            assert stats.resumed_by_copy == stats.host_blocks_out == 0
        assert stats.prefix_cache_hits == 0 and stats.host_cache_hits == 0
        if not caching:
            assert core.kv.pool.num_cached() == 0, "keys of requests that have ended"
            assert stats.prefix_cache_queries == stats.host_cache_queries == 0
            assert core.stats().host_blocks_used == 0
    needed = 8 * (30 + 59)
    assert rows[400] - needed < (rows[0] - needed) / 2


def test_without_prefix_caching_nobody_finds_another_ones_blocks():
    core = make_core(num_blocks=60, num_host_blocks=100, enable_prefix_caching=False)
    prompt = prompts(1, 64)[0]
    for i in range(3):
        core.add(request(str(i), prompt, 40))
    outputs = run(core)
    assert [outputs[str(i)][-1].num_cached_tokens for i in range(3)] == [0, 0, 0]
    tables = [a.block_ids[0] for plan in core.executor.plans for a in plan.admissions]
    assert len(set(sum(tables, []))) == sum(map(len, tables))


@pytest.mark.parametrize("overlap", [False, True])
def test_two_requests_that_only_together_exceed_the_pool(overlap):
    core = make_core(num_blocks=14, num_host_blocks=100, async_scheduling=overlap)
    work = prompts(2, 40)
    for i, prompt in enumerate(work):
        core.add(request(str(i), prompt, 50))  # 12 blocks each
    outputs = run(core)
    assert [tokens_of(outputs[str(i)]) for i in range(2)] == [expected(p, 50) for p in work]
    assert outputs["0"][-1].metrics.num_preemptions == 0
    assert outputs["1"][-1].metrics.num_preemptions > 0
    assert core.stats().resumed_by_copy > 0


@pytest.mark.parametrize("disk", [False, True])
def test_salts_isolate_through_the_tiers(disk):
    core = make_core(num_blocks=60, num_host_blocks=12 if disk else 500, disk=disk)
    prompt = prompts(1, 100)[0]
    assert answer(core, "a", prompt, cache_salt="A").num_cached_tokens == 0
    crowd_out(core)
    crowd_out(core, 2)
    assert core.kv.pool.find(0, core.kv.hasher.root) is None
    for name, salt, cached in [("b", "B", 0), ("none", None, 0), ("again", "A", 96)]:
        assert answer(core, name, prompt, cache_salt=salt).num_cached_tokens == cached
        crowd_out(core, 3)
    assert core.stats().host_cache_hits > 0
    assert not disk or core.stats().disk_cache_hits > 0


def test_copying_only_where_it_is_quicker():
    core = make_core(num_blocks=60, num_host_blocks=500)
    offloading = core.kv.offloading
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    crowd_out(core)
    crowd_out(core, 2)
    # 64 bytes a block. Computing 96 tokens takes 1 s; copying 12 blocks 1.2 s.
    offloading._rates = type(offloading._rates)(64, host_copy_rate=640.0, prefill_rate=96.0)
    assert not offloading.worth(12, 96, busy=False)
    assert offloading.worth(12, 96, busy=True)  # others want the device
    assert not offloading.worth(24, 96, busy=True)
    assert answer(core, "b", prompt).num_cached_tokens == 0
    crowd_out(core, 3)
    offloading._rates = type(offloading._rates)(64, host_copy_rate=6400.0, prefill_rate=96.0)
    assert answer(core, "c", prompt).num_cached_tokens == 96


def test_others_go_on_while_blocks_are_copied():
    core = make_core(num_blocks=60, num_host_blocks=500)
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    crowd_out(core)
    crowd_out(core, 2)
    core.executor.host.delay = lambda: 10
    core.add(request("other", [1, 2, 3], 60))
    core.step()
    core.add(request("b", prompt, 4))
    told = {"other": 0, "b": 0}
    for _ in range(8):
        for output in core.step():
            told[output.request_id] += len(output.new_token_ids)
    assert told == {"other": 8, "b": 0}
    assert core.stats().num_waiting == 1
    outputs = run(core)
    assert tokens_of(outputs["b"]) == expected(prompt, 4)
    assert core.executor.host.done == []


def test_two_requests_wait_for_the_same_copies():
    core = make_core(num_blocks=60, num_host_blocks=500)
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    crowd_out(core)
    crowd_out(core, 2)
    before = core.stats().host_blocks_in
    core.executor.host.delay = lambda: 5
    for name in "bcd":
        core.add(request(name, [*prompt, 1], 4))
    outputs = run(core)
    assert [outputs[name][-1].num_cached_tokens for name in "bcd"] == [96, 96, 96]
    assert core.stats().host_blocks_in - before <= 12


@pytest.mark.parametrize("overlap", [False, True])
def test_copies_that_fail_cost_time_alone(overlap):
    core = make_core(num_blocks=60, num_host_blocks=500, async_scheduling=overlap)
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    crowd_out(core)
    crowd_out(core, 2)
    core.executor.host.delay = lambda: 3
    core.executor.host.fails = lambda: True
    output = answer(core, "b", prompt)
    assert output.num_cached_tokens < 96
    stats = core.stats()
    assert stats.host_loads_failed == 1 and stats.host_blocks_in == 0
    core.executor.host.fails = lambda: False
    crowd_out(core, 3)
    crowd_out(core, 4)
    assert answer(core, "c", prompt).num_cached_tokens == 96  # and was copied out anew


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_a_request_that_is_aborted_while_it_loads_holds_its_blocks_until_the_copies_are_through(
    joined, fails
):
    core = make_core(num_blocks=60, num_host_blocks=500)
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    crowd_out(core)
    crowd_out(core, 2)
    core.add(request("other", [1, 2, 3], 4))  # without it, the engine would wait for the copies
    core.step()
    core.executor.host.delay = lambda: 6
    core.executor.host.fails = lambda: fails
    core.add(request("b", prompt, 4))
    core.step()
    if joined:
        core.add(request("c", prompt, 4))
        core.step()
    held = core.kv.pool.num_used
    [output] = core.abort(["b"])
    assert output.finish_reason == "abort" and output.new_token_ids == []
    assert core.kv.pool.num_used == held > 12  # a copy still writes there
    outputs = run(core)
    assert not joined or tokens_of(outputs["c"]) == expected(prompt, 4)
    assert core.kv.pool.num_used == 0 and not core.has_work
    sim.check_contents(core.kv, core.executor)


def test_a_newer_loading_request_gives_way_to_a_running_one():
    core = make_core(num_blocks=30, num_host_blocks=500)
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    for i, other in enumerate(prompts(3, 150, 5)):
        answer(core, f"x{i}", other, 2)
    core.add(request("old", prompts(1, 120, 7)[0], 79))  # 25 blocks in the end, of 30
    early = [output for _ in range(4) for output in core.step()]
    core.executor.host.delay = lambda: 70
    core.add(request("new", prompt, 4))
    outputs = run(core)
    assert tokens_of(early + outputs["old"]) == expected(prompts(1, 120, 7)[0], 79)
    assert outputs["new"][-1].metrics.num_preemptions == 1
    assert tokens_of(outputs["new"]) == expected(prompt, 4)
    assert outputs["old"][-1].metrics.num_preemptions == 0


def test_resetting_the_prefix_cache_forgets_the_host_tier_and_copies_under_way():
    core = make_core(num_blocks=60, num_host_blocks=500)
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    crowd_out(core)
    crowd_out(core, 2)
    core.executor.host.delay = lambda: 4
    core.add(request("b", prompt, 4))
    core.step()
    core.reset_prefix_cache()
    outputs = run(core)
    assert tokens_of(outputs["b"]) == expected(prompt, 4)
    assert core.kv.offloading.tier.findable() == []
    core.reset_prefix_cache()
    assert answer(core, "c", prompt).num_cached_tokens == 0


def test_blocks_go_on_to_disk_and_come_back():
    core = make_core(num_blocks=60, num_host_blocks=40, disk=True)
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    for seed in range(1, 5):
        crowd_out(core, seed)
    core.executor.disk.delay = lambda: 2
    stats = core.stats()
    assert stats.host_evictions > 0 and stats.disk_blocks_out > 12 and stats.disk_blocks_in == 0
    assert stats.host_blocks_total == 40 and 0 < stats.host_blocks_used <= 40
    assert answer(core, "b", prompt).num_cached_tokens == 96
    stats = core.stats()
    assert stats.disk_cache_hits == stats.disk_blocks_in * 8 > 0
    assert stats.host_cache_hits == 96 and stats.disk_failures == 0


def test_two_requests_wait_for_the_same_reads():
    core = make_core(num_blocks=60, num_host_blocks=100, disk=True)
    prompt = prompts(1, 100, 3)[0]
    answer(core, "a", prompt)
    crowd_out(core)
    core.reset_prefix_cache()
    core.executor.disk.delay = lambda: 3
    read, before = core.executor.disk.num_read, core.stats()
    core.add(request("b", prompt, 4))
    core.add(request("c", prompt, 4))
    outputs = run(core)
    for name in "bc":
        assert tokens_of(outputs[name]) == expected(prompt, 4)
        assert outputs[name][-1].num_cached_tokens == 96
    assert core.executor.disk.num_read - read == 12
    stats = core.stats()
    assert stats.disk_cache_hits - before.disk_cache_hits == 96
    assert stats.disk_cache_queries - before.disk_cache_queries == 200


def test_a_request_that_needs_all_blocks_begins_once_one_that_read_from_disk_is_aborted():
    core = make_core(num_blocks=25, num_host_blocks=100, disk=True)
    prompt = prompts(1, 100, 3)[0]
    answer(core, "a", prompt)
    crowd_out(core)
    core.reset_prefix_cache()
    core.executor.disk.delay = lambda: 1000
    core.add(request("reads", prompt, 4))
    whole = prompts(1, 194, 5)[0]
    core.add(request("whole", whole, 6))
    for _ in range(3):
        assert core.step() == []
    assert core.scheduler._loading.num_live == 1
    core.abort(["reads"])
    core.executor.disk.delay = lambda: 0
    for _ in range(200):
        if outputs := core.step():
            break
    assert outputs[0].request_id == "whole"


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_cached_goes_to_disk_when_the_engine_ends(overlap, broken):
    core = make_core(num_blocks=200, num_host_blocks=3, disk=True, async_scheduling=overlap)
    core.executor.host.delay = core.executor.disk.delay = lambda: 2
    core.executor.disk.fails = lambda: broken
    texts = prompts(5, 100, 3)
    for i, prompt in enumerate(texts):
        answer(core, str(i), prompt, 1)
    core.add(request("running", texts[0], 50))
    for _ in range(4):
        core.step()
    core.close()
    core.kv.check([])
    assert core.kv.pool.num_used == 0
    kept = core.executor.disk.blocks
    assert len(kept) == (0 if broken else 5 * 12)
    assert core.stats().disk_failures == (5 * 12 if broken else 0)


def test_what_was_used_last_is_kept_where_the_disk_holds_less_than_the_cache():
    core = make_core(num_blocks=200, num_host_blocks=30, disk=True)
    assert core.executor.disk is not None
    core.executor.disk._capacity = 30
    texts = prompts(5, 100, 3)
    for i, prompt in enumerate(texts):
        answer(core, str(i), prompt, 1)
    core.close()
    keys = []
    for prompt in reversed(texts):
        chain: list[bytes] = []
        core.kv.hasher.extend(chain, np.asarray(prompt, np.int32), 12, NO_EXTRAS)
        keys += chain
    disk = core.executor.disk
    assert list(disk.blocks) == [(0, key) for key in keys[:30]]
    assert [disk.ranks[0, key] for key in keys[:30]] == list(range(30))


def test_blocks_that_cannot_be_read_from_disk_are_computed():
    core = make_core(num_blocks=60, num_host_blocks=14, disk=True)
    prompt = prompts(1, 100)[0]
    answer(core, "a", prompt)
    for seed in range(1, 5):
        crowd_out(core, seed)
    core.executor.disk.fails = lambda: True
    assert answer(core, "b", prompt).num_cached_tokens < 96
    assert core.stats().disk_failures > 0 and core.stats().disk_blocks_in == 0


def test_a_block_that_a_failed_step_completed_has_no_key_anywhere():
    """The step that completes it is launched before the tokens are known that make its key."""
    config = sim.EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, block_size=8, check_invariants=True, async_scheduling=True
    )
    core = EngineCore(config, Reporting(config, 40, 100, num_host_blocks=40))
    core.executor.late_failures = frozenset([1])
    core.add(request("a", prompts(1, 7)[0], 30))
    assert run(core)["a"][-1].finish_reason == "error"
    assert core.kv.pool.num_cached() == 0 and core.kv.offloading.tier.findable() == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 9), (9,)], ids=str)
@pytest.mark.parametrize("slots", [0, 3, 200])
def test_preemption_at_every_step_changes_no_token(windows, overlap, slots):
    work = {"a": (prompts(1, 21)[0], 12), "b": (prompts(1, 12, 3)[0], 14)}
    settings = dict(
        num_blocks=30, windows=windows, num_host_blocks=slots, async_scheduling=overlap,
        max_num_batched_tokens=10,
    )  # fmt: skip
    steps, resumed = 1, 0
    at = 0
    while at < steps:
        core = make_core(**settings)
        core.executor.host.delay = lambda: 1
        for name, (prompt, count) in work.items():
            core.add(request(name, prompt, count))
        outputs, number = {}, 0
        while core.has_work:
            if number in (at, at + 3):
                running = core.scheduler._slots.running
                for slot in running[number != at :].tolist():
                    core.scheduler._preempt(core.scheduler._slots.at(slot))
                crowd_of = core.kv.pool.allocate(core.kv.pool.num_free)  # what they left is reused at once
                core.kv.pool.release(crowd_of)
            for output in core.step():
                outputs.setdefault(output.request_id, []).append(output)
            number += 1
        for name, (prompt, count) in work.items():
            assert tokens_of(outputs[name]) == expected(prompt, count)
        resumed += core.stats().resumed_by_copy
        steps, at = max(steps, number - 8), at + 1
    assert steps > 10
    assert resumed > 0 if slots > 3 else resumed == 0 or slots


def test_prompts_that_are_equal_share_blocks_while_they_are_computed():
    """n > 1, or the same text in parallel: full blocks once, the rest by each for itself."""
    for windows in [(None,), (None, 20)]:
        core = make_core(num_blocks=200, windows=windows, max_num_batched_tokens=400)
        for length in (64, 65, 71):
            prompt = prompts(1, length, length)[0]
            for i in range(4):
                params = SamplingParams(max_tokens=12, temperature=0.0)
                core.add(request(f"{length}-{i}", prompt, params=params))
            core.step()
            plan = core.executor.plans[-1]
            shared = (length - 1) // 8
            # The last block is not full, or its last token must be computed for its logits: each has its own.
            assert sorted(plan.num_rows.tolist()) == [length - 8 * shared] * 3 + [length]
            for group in range(len(windows)):
                first, *others = tables = [a.block_ids[group] for a in plan.admissions]
                for table in others:
                    held = [block for block in table[:shared] if block != -1]
                    assert held and held == first[shared - len(held) : shared]
                assert len({table[shared] for table in tables}) == 4
            outputs = run(core)
            assert all(
                tokens_of(outputs[f"{length}-{i}"])[-11:] == expected(prompt, 12)[1:] for i in range(4)
            )
