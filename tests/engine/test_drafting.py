"""Drafts in the scheduler, over the pretend model: tokens, counts, limits, blocks."""

import random
from typing import Any

import numpy as np
import pytest

from octavo.engine.drafting import HostDrafting
from octavo.kv.manager import KVManager
from octavo.sampling_params import SamplingParams
from octavo.speculative.proposer import NOTHING
from octavo.step_messages import StepPlan, StepResult
from tests.engine import simulation as sim


def core_with(drafts: int, right: float, adaptive: bool = False, **settings):
    config = {"method": "ngram", "num_speculative_tokens": drafts, "adaptive": adaptive}
    core = sim.make_core(speculative_config=config, **settings)
    sim.draft(core, sim.Guesser(right))
    return core


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_tokens_are_those_of_plain_decoding(right: float, overlap: bool, adaptive: bool):
    core = core_with(4, right, adaptive, async_scheduling=overlap)
    prompts = [list(range(i, i + 5 + 9 * i)) for i in range(6)]
    for i, prompt in enumerate(prompts):
        core.add(sim.request(f"r{i}", prompt, 30))
    outputs = sim.run(core)
    for i, prompt in enumerate(prompts):
        assert sim.tokens_of(outputs[f"r{i}"]) == sim.expected(prompt, 30)
    stats = core.stats()
    assert stats.generation_tokens == 6 * 30
    if adaptive:
        return
    assert stats.spec_draft_tokens > stats.spec_drafts > 0
    # The last draft may reach beyond the end of the request, where nobody counts it.
    assert sum(stats.spec_accepted_per_pos) == stats.spec_accepted_tokens
    if right == 0.0:
        assert stats.spec_accepted_tokens == 0
    elif right == 1.0:
        assert stats.spec_accepted_tokens == stats.spec_draft_tokens
        assert stats.num_steps < 30
    else:
        assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


def test_a_request_ends_at_its_limit_or_its_stop_token_within_a_draft():
    prompt = [1, 2, 3]
    answer = sim.expected(prompt, 40)
    stop = next(i for i in range(5, 40) if answer[i] not in answer[:i])
    for most in (1, 2, 3, 7, 8):
        core = core_with(8, 1.0)
        core.add(sim.request("limit", prompt, most))
        params = SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=[answer[stop]])
        core.add(sim.request("stop", prompt, params=params))
        outputs = sim.run(core)
        assert sim.tokens_of(outputs["limit"]) == answer[:most]
        assert outputs["limit"][-1].finish_reason == "length"
        assert sim.tokens_of(outputs["stop"]) == answer[: stop + 1]
        assert outputs["stop"][-1].finish_reason == "stop"
        assert outputs["stop"][-1].stop_reason == answer[stop]


def test_the_context_is_used_to_its_last_token():
    core = core_with(9, 1.0, max_model_len=40)
    prompt = list(range(20))
    core.add(sim.request("r", prompt, 20))
    assert sim.tokens_of(sim.run(core)["r"]) == sim.expected(prompt, 20)


def test_nobody_is_preempted_for_drafts():
    """Four requests that fill the pool to its last block at their ends."""
    for drafts in (0, 8):
        core = sim.make_core(num_blocks=16) if not drafts else core_with(drafts, 0.3, num_blocks=16)
        for i in range(4):
            core.add(sim.request(f"r{i}", [i] * 8, 24))
        outputs = sim.run(core)
        assert all(sim.tokens_of(outputs[f"r{i}"]) == sim.expected([i] * 8, 24) for i in range(4))
        assert core.stats().num_preemptions == 0


def test_drafts_fit_into_the_budget():
    core = core_with(8, 0.9, max_num_batched_tokens=10)
    for i in range(8):
        core.add(sim.request(f"r{i}", list(range(i, i + 15)), 20))
    outputs = sim.run(core)
    assert all(sim.tokens_of(outputs[f"r{i}"]) == sim.expected(list(range(i, i + 15)), 20) for i in range(8))
    assert core.executor.largest <= 10


def test_log_probabilities_keep_one_entry_per_token():
    from tests.engine.test_random_mixes import Reporting

    core = core_with(5, 0.8)
    executor = Reporting(core.config, 64, 200)
    core.executor = executor
    core.wrap_stages(None)
    core._execute = executor.execute
    params = SamplingParams(max_tokens=25, temperature=0.0, logprobs=0)
    core.add(sim.request("r", [5, 6], params=params))
    outputs = sim.run(core)["r"]
    tokens = sim.tokens_of(outputs)
    entries = [entry for output in outputs for entry in output.logprobs or []]
    assert tokens == sim.expected([5, 6], 25)
    assert [entry.ids[0] for entry in entries] == tokens
    assert max(len(output.new_token_ids) for output in outputs) > 1


def test_blocks_of_judged_drafts_are_shared():
    """What drafts filled is in the prefix cache, and right: a second request reads it."""
    core = core_with(6, 0.6, windows=(None, 16))
    prompt = list(range(30))
    core.add(sim.request("first", prompt, 40))
    answer = sim.tokens_of(sim.run(core)["first"])
    again = prompt + answer
    core.add(sim.request("second", again, 10))
    outputs = sim.run(core)["second"]
    assert sim.tokens_of(outputs) == sim.expected(again, 10)
    assert outputs[-1].num_cached_tokens == (len(again) - 1) // 8 * 8
    assert np.all(core.scheduler._slots.in_doubt == 0)


@pytest.mark.parametrize("salt", [None, "mine"])
def test_earlier_outputs_are_drafted_from_but_not_salted_ones(salt: str | None):
    """The same request twice: the first has nothing to draft from, the second its output."""
    core = sim.make_core(
        speculative_config={"method": "suffix", "adaptive": False}, enable_prefix_caching=False
    )
    accepted = []
    for i in range(2):
        request = sim.request(f"r{i}", [1, 2, 3], 40)
        request.cache_salt = salt
        core.add(request)
        assert sim.tokens_of(sim.run(core)[f"r{i}"]) == sim.expected([1, 2, 3], 40)
        accepted.append(core.stats().spec_accepted_tokens)
    again = accepted[1] - accepted[0]
    assert (again > 25) == (salt is None), accepted


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_drafts_where_blocks_are_short_preempt_no_more_than_no_drafts(right: float):
    """Over many loads that don't fit: blocks of drafts that are not there any more are nobody's loss."""
    counts = []
    for drafts in (0, 8):
        preempted = 0
        for seed in range(12):
            draw = random.Random(seed)
            settings = dict(num_blocks=30, enable_prefix_caching=False, check_invariants=seed < 3)
            core = core_with(drafts, right, **settings) if drafts else sim.make_core(**settings)
            asked = [
                ([draw.randrange(1000) for _ in range(draw.randint(4, 30))], draw.randint(5, 60))
                for _ in range(20)
            ]
            for i, (prompt, most) in enumerate(asked):
                core.add(sim.request(f"r{i}", prompt, most))
            outputs = sim.run(core)
            for i, (prompt, most) in enumerate(asked[::5]):
                assert sim.tokens_of(outputs[f"r{5 * i}"]) == sim.expected(prompt, most)
            preempted += core.stats().num_preemptions
        counts.append(preempted)
    assert counts[0] >= counts[1] > 0, counts


@pytest.mark.parametrize("windows", [(None,), (None, 16)])
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_of_drafts_that_did_not_stand_are_given_back_first(
    overlap: bool, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
):
    freed = []
    shrink = KVManager.shrink

    def watched(kv: KVManager, seq: Any, num_tokens: int) -> int:
        freed.append(shrink(kv, seq, num_tokens))
        return freed[-1]

    monkeypatch.setattr(KVManager, "shrink", watched)
    settings = dict(num_blocks=30 * len(windows), windows=windows, async_scheduling=overlap)
    core = core_with(16, 0.2, **settings)
    for i in range(24):
        core.add(sim.request(f"r{i}", [i] * (5 + i), 60))
    outputs = sim.run(core)
    for i in range(24):
        assert sim.tokens_of(outputs[f"r{i}"]) == sim.expected([i] * (5 + i), 60)
    assert sum(freed) > 0 and core.stats().num_preemptions > 0
    assert core.stats().kv_blocks_used == 0


def test_steps_without_rows_tell_nothing_of_how_long_rows_take():
    """Those that ask for news of copies: an engine with a host tier would find one row to cost nothing."""
    core = core_with(4, 1.0, adaptive=True)
    drafting = core.scheduler.drafting
    assert drafting is not None
    none = np.zeros(0, np.int32)
    waiting = StepPlan(0, [], [], none, none, none, none.astype(bool))
    drafting.timed(waiting, StepResult(np.zeros((0, 1), np.int32), none), 1e-6)
    assert drafting.adaptation.times.curve(1, 1) is None


@pytest.mark.parametrize(("right", "found"), [(1.0, True), (0.0, False)])
def test_steps_overlap_as_long_as_nothing_is_found_to_draft(right: float, found: bool):
    """The engine waits for the tokens of a step only where drafts are likely behind them."""
    core = core_with(4, right, adaptive=True, async_scheduling=True)
    drafting = core.scheduler.drafting
    assert isinstance(drafting, HostDrafting)
    if not found:
        drafting._proposer.propose = lambda slot, tokens, most: NOTHING  # type: ignore[method-assign]
    drafting.adaptation.looked = drafting.adaptation.proposed = lambda seconds: None  # type: ignore
    look, waits = drafting.look_ahead, [0, 0]

    def counted(in_flight: bool) -> bool:
        waits[in_flight] += look(in_flight)
        return drafting.alone

    drafting.look_ahead = counted  # type: ignore[method-assign]
    core.add(sim.request("r", [1, 2, 3], 150))
    outputs = sim.run(core)
    assert sim.tokens_of(outputs["r"]) == sim.expected([1, 2, 3], 150)
    stats = core.stats()
    if found:
        assert waits[True] > 20 and stats.num_steps < 110
    else:
        assert waits[True] == 0 and stats.num_steps == 150


def test_stages_compute_beside_each_other_as_long_as_nothing_is_found_to_draft():
    core = core_with(4, 0.0, adaptive=True, pipeline_parallel_size=2, max_num_seqs=16)
    drafting, most = core.scheduler.drafting, 0
    assert isinstance(drafting, HostDrafting)
    drafting._proposer.propose = lambda slot, tokens, most: NOTHING  # type: ignore[method-assign]
    drafting.adaptation.looked = drafting.adaptation.proposed = lambda seconds: None  # type: ignore
    for i in range(4):
        core.add(sim.request(f"r{i}", [1 + i, 2, 3], 50))
    plans = core.executor.plans  # type: ignore[attr-defined]
    while core.has_work:
        core.step()
        most = max(most, len(core._in_flight))
    assert most == 2 and max(len(plan.slots) for plan in plans[10:-10]) == 2


def test_after_a_failed_step_the_device_has_not_been_idle_since_the_last_good_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_with(4, 1.0, adaptive=True, async_scheduling=True)
    core.add(sim.request("r", [1, 2, 3], 50))
    for _ in range(4):
        core.step()
    before, wait = core._last_end, core._wait

    def fail(pending: Any) -> Any:
        monkeypatch.setattr(core, "_wait", wait)
        raise RuntimeError("injected")

    monkeypatch.setattr(core, "_wait", fail)
    assert core._in_flight
    core._take_in_oldest()
    assert core._last_end > before
