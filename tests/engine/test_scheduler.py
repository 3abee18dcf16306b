"""The scheduler against a pretend model whose cache remembers what each slot holds."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from octavo.sampling_params import SamplingParams
from tests.engine.simulation import expected, make_core, request, run, tokens_of


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 64, 4096])
@pytest.mark.parametrize("block_size", [8, 16])
def test_tokens_do_not_depend_on_chunks_blocks_or_overlap(overlap, budget, block_size):
    core = make_core(async_scheduling=overlap, max_num_batched_tokens=budget, block_size=block_size)
    work = prompts(12, 1, 60)
    for i, prompt in enumerate(work):
        core.add(request(str(i), prompt, 10))
    outputs = run(core)
    for i, prompt in enumerate(work):
        assert tokens_of(outputs[str(i)]) == expected(prompt, 10)
        assert outputs[str(i)][-1].finish_reason == "length"
    assert core.executor.largest <= budget
    assert core.stats().kv_blocks_used == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 200)])
def test_preemption_changes_no_token_and_is_no_cache_hit(overlap, windows):
    core = make_core(num_blocks=24 * len(windows), async_scheduling=overlap, windows=windows)
    work = prompts(8, 10, 30, seed=3)
    for i, prompt in enumerate(work):
        core.add(request(str(i), prompt, 60))
    outputs = run(core)
    for i, prompt in enumerate(work):
        assert tokens_of(outputs[str(i)]) == expected(prompt, 60)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits < 0.01 * stats.prefix_cache_queries
    assert stats.prefix_cache_queries == sum(map(len, work))
    assert max(o.metrics.num_preemptions for outs in outputs.values() for o in outs if o.metrics) > 0


@pytest.mark.parametrize("length, cached", [(64, 48), (65, 64), (15, 0), (16, 0), (17, 16)])
def test_cached_tokens_at_block_edges(length, cached):
    core = make_core(block_size=16)
    prompt = prompts(1, length, length)[0]
    core.add(request("a", prompt, 1))
    assert run(core)["a"][-1].num_cached_tokens == 0
    core.add(request("b", prompt, 1))
    output = run(core)["b"][-1]
    assert output.num_cached_tokens == cached
    assert output.new_token_ids == expected(prompt, 1)
    assert core.stats().prefix_cache_hits == cached
    assert core.stats().prefix_cache_queries == 2 * length


def test_requests_of_one_step_share_a_prefix():
    core = make_core(max_num_batched_tokens=200)
    head = prompts(1, 64, 64)[0]
    for i in range(4):
        core.add(request(str(i), [*head, i, i + 1], 3))
    outputs = run(core)
    assert [outputs[str(i)][-1].num_cached_tokens for i in range(4)] == [0, 64, 64, 64]
    for i in range(4):
        assert tokens_of(outputs[str(i)]) == expected([*head, i, i + 1], 3)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("threshold", [0, 16])
@pytest.mark.parametrize("windows", [(None,), (None, 20), (9,)], ids=str)
def test_a_beginning_that_takes_several_steps_is_computed_once(windows, threshold, stages):
    """Of n choices, and of questions about one text; an unrelated one behind them waits for none of it."""
    core = make_core(
        num_blocks=500, max_model_len=300, windows=windows, max_num_batched_tokens=32, max_num_seqs=9,
        long_prefill_token_threshold=threshold, pipeline_parallel_size=stages,
    )  # fmt: skip
    text, other = prompts(2, 200, 200, 8)
    asked = {f"n{i}": text for i in range(4)} | {f"q{i}": [*text[:150], *other[: 20 + i]] for i in range(3)}
    asked["short"] = other[:10]
    for name, prompt in asked.items():
        core.add(request(name, prompt, 1))
    order, outputs = [], {}
    while core.has_work:
        assert core.stats().num_running + core.stats().num_waiting == len(asked) - len(order)
        for output in core.step():
            outputs[output.request_id] = output
            order.append(output.request_id)
    for name, prompt in asked.items():
        assert outputs[name].new_token_ids == expected(prompt, 1)
    computed = sum(plan.total_rows for plan in core.executor.plans)
    # The text, what is behind its last shared block, the questions, of which two find nobody ahead at times.
    assert computed <= 200 + 3 * 8 + 3 * (6 + 22) + 10 + 32
    assert order[0] == "short"


def test_nobody_waits_for_a_beginning_of_another_salt_or_a_lower_priority():
    core = make_core(num_blocks=500, max_num_batched_tokens=32, scheduling_policy="priority")
    text = prompts(1, 150, 150, 8)[0]
    core.add(request("first", text, 1))
    core.step()
    core.add(request("salted", text, 1, cache_salt="x"))
    core.add(request("urgent", text, 1, priority=-1))
    for _ in range(3):
        core.step()
    assert len(core.scheduler._slots.running) == 3
    run(core)


def test_those_who_wait_for_another_ones_beginning_go_on_without_it():
    core = make_core(num_blocks=500, max_num_batched_tokens=32)
    text = prompts(1, 150, 150, 8)[0]
    for name in "abc":
        core.add(request(name, text, 2))
    for _ in range(2):
        core.step()
    assert len(core.scheduler._slots.running) == 1 and core.stats().num_waiting == 2
    core.abort("b")  # one that waits
    core.abort("a")  # and the one that is computed
    outputs = run(core)
    assert list(outputs) == ["c"] and tokens_of(outputs["c"]) == expected(text, 2)
    assert outputs["c"][0].num_cached_tokens >= 32


def test_generated_blocks_are_reused_by_the_next_turn():
    core = make_core()
    prompt = prompts(1, 20, 20)[0]
    core.add(request("a", prompt, 30))
    answer = tokens_of(run(core)["a"])
    core.add(request("b", prompt + answer + [1, 2], 2))
    # 50 tokens were known, the last one's KV was never computed: 6 blocks of 8.
    assert run(core)["b"][-1].num_cached_tokens == 48


def test_salts_and_other_extra_keys_never_share():
    core = make_core()
    prompt = prompts(1, 100, 100)[0]
    hits = []
    kinds = [
        dict(cache_salt="A"), dict(cache_salt="A"), dict(cache_salt="B"), {}, {},
        dict(lora_digest=b"x"), dict(lora_digest=b"y"), dict(lora_digest=b"x"),
        dict(mm_spans=[(4, 8, b"img")]), dict(mm_spans=[(5, 8, b"img")]), dict(mm_spans=[(4, 8, b"img")]),
        dict(prompt_embeds_hash=b"e"), dict(prompt_embeds_hash=b"e"),
    ]  # fmt: skip
    for i, kind in enumerate(kinds):
        core.add(request(str(i), prompt, 1, **kind))
        hits.append(run(core)[str(i)][-1].num_cached_tokens)
    full = 96
    assert hits == [0, full, 0, 0, full, 0, 0, full, 0, 0, full, 0, full]


def test_equal_blocks_behind_different_beginnings_are_not_shared():
    core = make_core(block_size=8)
    first, second, tail = prompts(3, 8, 8)
    for i, prompt in enumerate([first + tail + tail, second + tail, tail, tail + tail, first + tail + [1]]):
        core.add(request(str(i), prompt, 3))
        output = run(core)[str(i)]
        assert output[-1].num_cached_tokens == (0, 0, 0, 8, 16)[i]
        assert tokens_of(output) == expected(prompt, 3)


def test_prompt_logprobs_skip_the_lookup_but_fill_the_cache():
    core = make_core()
    prompt = prompts(1, 40, 40)[0]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    core.add(request("a", prompt, params=params))
    run(core)
    core.add(request("b", prompt, 1))
    assert run(core)["b"][-1].num_cached_tokens == 32
    core.add(request("c", prompt, params=params))
    assert run(core)["c"][-1].num_cached_tokens == 0
    assert core.executor.plans[-1].prompt_logprobs.tolist() == [2]


@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_free_everything_at_any_stage(overlap):
    rng = random.Random(7)
    core = make_core(num_blocks=40, async_scheduling=overlap)
    for round_ in range(8):
        work = {f"{round_}-{i}": p for i, p in enumerate(prompts(20, 1, 80, seed=round_))}
        for name, prompt in work.items():
            core.add(request(name, prompt, 20))
        gone, outputs = set(), {}
        while core.has_work:
            for output in core.step():
                outputs.setdefault(output.request_id, []).append(output)
            if rng.random() < 0.4:
                name = rng.choice(list(work))
                for output in core.abort([name]):
                    assert output.finish_reason == "abort"
                    gone.add(name)
        for name, prompt in work.items():
            if name not in gone:
                assert tokens_of(outputs[name]) == expected(prompt, 20)
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    core.add(request("large", prompts(1, 190, 190)[0], 10))
    assert run(core)["large"][-1].finish_reason == "length"


def test_a_failed_step_ends_its_requests_and_takes_back_their_keys():
    core = make_core(max_num_batched_tokens=16)
    first, second = prompts(2, 40, 40)
    core.executor.fail_at = 1
    core.add(request("a", first))
    outputs = run(core)
    assert outputs["a"][-1].finish_reason == "error"
    assert "pretend failure" in outputs["a"][-1].error
    core.add(request("b", first, 5))
    again = run(core)["b"]
    assert again[-1].num_cached_tokens == 16  # step 0's chunk was computed, the failed one's was not
    assert tokens_of(again) == expected(first, 5)
    core.add(request("c", second, 5))
    assert tokens_of(run(core)["c"]) == expected(second, 5)


@pytest.mark.parametrize("budget", [4, 32])
def test_a_long_prompt_stalls_nobody(budget):
    core = make_core(num_blocks=200, max_model_len=500, max_num_batched_tokens=budget)
    for i in range(3):
        core.add(request(f"s{i}", [i, 1, 2], 450))
    for _ in range(10):
        core.step()
    core.add(request("long", prompts(1, 300, 300)[0], 1))
    core.step()
    core.add(request("short", prompts(1, 20, 20, seed=9)[0], 1))
    finished, steps_without = {}, 0
    for step in range(2000):
        outputs = core.step()
        streamed = {o.request_id for o in outputs if o.new_token_ids}
        steps_without = 0 if {"s0", "s1", "s2"} <= streamed else steps_without + 1
        assert steps_without <= 1 or "s0" in finished, "a running stream missed two steps"
        finished |= {o.request_id: step for o in outputs if o.finish_reason}
        if "long" in finished and "short" in finished:
            break
    assert finished["short"] < finished["long"] / 3


def test_decodes_take_turns_when_the_budget_is_smaller_than_their_number():
    core = make_core(max_num_batched_tokens=3)
    for i in range(8):
        core.add(request(str(i), [i], 100))
    while core.stats().num_waiting:
        core.step()
    counts = dict.fromkeys(map(str, range(8)), 0)
    for _ in range(40):
        for output in core.step():
            counts[output.request_id] += len(output.new_token_ids)
    assert max(counts.values()) - min(counts.values()) <= 2


def test_priority_runs_lower_first_and_preempts_higher():
    core = make_core(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in [("c", 5), ("a", -1), ("b", 2)]:
        core.add(request(name, [1, 2, 3], 3, priority=priority))
    order = []
    while core.has_work:
        order += [o.request_id for o in core.step() if o.finish_reason]
    assert order == ["a", "b", "c"]
    core = make_core(scheduling_policy="priority", num_blocks=12)
    for name, priority in [("low", 9), ("high", 0)]:
        core.add(request(name, prompts(1, 24, 24, seed=priority)[0], 60, priority=priority))
    outputs = run(core)
    assert outputs["low"][-1].metrics.num_preemptions > 0
    assert outputs["high"][-1].metrics.num_preemptions == 0


def test_fcfs_keeps_the_order_of_arrival_after_preemption():
    core = make_core(num_blocks=14)
    for i, prompt in enumerate(prompts(3, 20, 20)):
        core.add(request(str(i), prompt, 60))
    order = []
    while core.has_work:
        order += [o.request_id for o in core.step() if o.finish_reason]
    assert core.stats().num_preemptions > 0
    assert order == ["0", "1", "2"]


def test_stop_tokens_and_min_tokens():
    prompt = [1, 2, 3]
    tokens = expected(prompt, 12)
    stop = tokens[4]
    first = tokens.index(stop)
    core = make_core(async_scheduling=True)
    core.add(request("stop", prompt, params=SamplingParams(max_tokens=12, stop_token_ids=[stop])))
    core.add(request("eos", prompt, 12, eos_token_ids=[stop]))
    core.add(
        request(
            "least", prompt, 12, params=SamplingParams(max_tokens=12, min_tokens=12, stop_token_ids=[stop])
        )
    )
    outputs = run(core)
    assert tokens_of(outputs["stop"]) == tokens[: first + 1] == tokens_of(outputs["eos"])
    assert (outputs["stop"][-1].finish_reason, outputs["stop"][-1].stop_reason) == ("stop", stop)
    assert (outputs["eos"][-1].finish_reason, outputs["eos"][-1].stop_reason) == ("stop", None)
    assert tokens_of(outputs["least"]) == tokens


def test_requests_that_do_not_stream_report_once():
    core = make_core()
    core.add(request("a", [1, 2], 9, stream=False))
    outputs = run(core)["a"]
    assert len(outputs) == 1
    assert outputs[0].new_token_ids == expected([1, 2], 9)


def test_counters_add_up():
    core = make_core()
    for i in range(20):
        core.add(request(str(i), [i] * (i + 1), 5))
    core.step()
    core.abort(["0", "1", "19"])
    outputs = run(core)
    stats = core.stats()
    reported = sum(len(tokens_of(o)) for o in outputs.values())
    assert stats.generation_tokens >= reported
    assert len(outputs) == 17
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_scheduling_512_requests_takes_under_a_millisecond():
    core = make_core(
        num_blocks=512 * 20, max_model_len=400, max_num_seqs=512, max_num_batched_tokens=8192, block_size=16,
        check_invariants=False, enable_prefix_caching=False,
    )  # fmt: skip
    scheduler = core.scheduler
    for i in range(512):
        scheduler.add(request(str(i), [i % 1000] * 100, 250, stream=False))
    from octavo.step_messages import StepResult

    times = []
    for _ in range(120):
        begin = time.thread_time()  # unlike the clock's, not other processes' business
        step = scheduler.schedule()
        count = len(step.plan.slots)
        result = StepResult(np.full((count, 1), 5, np.int32), step.plan.samples.astype(np.int32))
        scheduler.update(step, result)
        if count == 512 and step.plan.total_rows == 512:
            times.append(time.thread_time() - begin)
    assert len(times) > 80
    print(f"median of schedule and update with 512 running: {np.median(times) * 1e6:.0f} µs")
    assert np.median(times) < 1e-3


def shared_of(core) -> list[int]:
    """Shared blocks of the steps of several requests of one row each since the last call."""
    plans, core.executor.plans = core.executor.plans, []
    assert not any(p.shared_blocks for p in plans if len(p.slots) == 1 or p.num_rows.max() > 1)
    return [p.shared_blocks for p in plans if len(p.slots) > 1 and (p.num_rows == 1).all()]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows, shared", [((None,), 6), ((None, 20, None), 6), ((20,), 0)])
def test_blocks_that_all_requests_of_a_step_share(overlap, windows, shared):
    """Sharers run; one joins that shares nothing, and one that shares less; they leave; slots are reused."""
    core = make_core(num_blocks=200 * len(windows), async_scheduling=overlap, windows=windows)
    head = prompts(1, 50, 50)[0]  # 6 blocks of 8 and 2 tokens
    for i in range(3):
        core.add(request(str(i), [*head, i, i], 80 - 20 * i))
    while core.stats().generation_tokens < 9:
        core.step()
    shared_of(core)
    core.step()
    assert shared_of(core) == [shared]
    for name, prompt in [("other", prompts(1, 20, 20, seed=5)[0]), ("less", [*head[:30], *range(25)])]:
        core.add(request(name, prompt, 8))
        while core.stats().num_waiting:
            core.step()
        shared_of(core)
        for _ in range(3):
            core.step()
        assert shared_of(core) == [0 if name == "other" else min(shared, 3)] * 3
        while core.stats().num_running > 3:
            core.step()
        core.step()
        shared_of(core)
        core.step()
        assert shared_of(core) == [shared]
    while core.stats().num_running > 1:  # the newest end first, with one of which the others are compared
        core.step()
    counts = shared_of(core)
    assert len(counts) > 20 and set(counts) == {shared}
    assert run(core)["0"][-1].finish_reason == "length"
    assert shared_of(core) == []


def test_a_block_that_a_step_fills_is_not_shared_in_it():
    """A request may adopt a block whose last row the same step computes, beside its own only row."""
    core = make_core()
    prompt = prompts(1, 16, 16)[0]
    core.add(request("a", prompt, 30))
    while core.stats().generation_tokens < 8:
        core.step()
    shared_of(core)
    core.add(request("b", [*prompt, *expected(prompt, 8), 1], 9))
    core.step()
    core.step()
    assert core.executor.plans[0].start.tolist() == [23, 24]
    assert shared_of(core) == [2, 3]


def test_shared_blocks_after_preemption_and_without_the_setting():
    for settings in [{}, {"disable_cascade_attn": True}, {"enable_prefix_caching": False}]:
        core = make_core(num_blocks=34, **settings)
        head = prompts(1, 32, 32)[0]
        for i in range(6):
            core.add(request(str(i), [*head, i], 60))
        outputs = run(core)
        for i in range(6):
            assert tokens_of(outputs[str(i)]) == expected([*head, i], 60)
        assert core.stats().num_preemptions > 0
        assert max(shared_of(core)) == (0 if settings else 4)
