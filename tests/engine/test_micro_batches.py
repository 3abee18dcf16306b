"""Several steps under way at once: who is in them, over the pretend model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from octavo.engine.core import EngineCore
from octavo.engine.pipeline_clock import PipelineClock
from octavo.messages import CoreOutput
from octavo.sampling_params import SamplingParams
from tests.engine import simulation as sim


def run(core: EngineCore) -> dict[str, list[int]]:
    outputs: list[CoreOutput] = []
    while core.has_work:
        outputs += core.step()
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def core_of(prompts: list[list[int]], count: int, **settings: Any) -> EngineCore:
    core = sim.make_core(num_blocks=200, **dict(max_num_seqs=32) | settings)
    for i, prompt in enumerate(prompts):
        core.add(sim.request(f"r{i}", prompt, params=SamplingParams(temperature=0.0, max_tokens=count)))
    return core


def prompts_of(count: int, length: int = 5) -> list[list[int]]:
    draw = random.Random(count)
    return [draw.choices(range(sim.VOCAB), k=length) for _ in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("requests", [1, 3, 8, 13])
def test_steps_share_the_requests_evenly(requests: int, stages: int, overlap: bool) -> None:
    prompts = prompts_of(requests)
    core = core_of(prompts, 30, pipeline_parallel_size=stages, async_scheduling=overlap)
    most = 0
    seen: list[int] = []
    step = core.step

    def watched() -> list[CoreOutput]:
        nonlocal most
        before = len(core.executor.plans)  # type: ignore[attr-defined]
        news = step()
        seen.extend(len(plan.slots) for plan in core.executor.plans[before:])  # type: ignore[attr-defined]
        most = max(most, len(core._in_flight))
        return news

    core.step = watched  # type: ignore[method-assign]
    assert run(core) == {f"r{i}": sim.expected(prompt, 30) for i, prompt in enumerate(prompts)}
    assert most == min(requests, stages - 1 + overlap)
    # Once the prompts are through; at the end some have more tokens to go than others.
    steady = seen[4 * stages : 20 * min(stages, requests)]
    assert max(steady) == -(-requests // stages)
    assert np.mean(steady) >= 0.8 * requests / min(stages, requests)


def test_a_lone_request_has_one_step_under_way() -> None:
    core = core_of([[1, 2, 3]], 10, pipeline_parallel_size=3)
    assert run(core)["r0"] == sim.expected([1, 2, 3], 10)
    assert len(core.executor.plans) == 10  # type: ignore[attr-defined]


def test_chunks_of_a_prompt_follow_each_other() -> None:
    prompt = prompts_of(1, 100)[0]
    core = core_of([prompt], 2, pipeline_parallel_size=4, max_num_batched_tokens=16)
    for _ in range(3):
        core.step()
    assert len(core._in_flight) == 3
    assert run(core)["r0"] == sim.expected(prompt, 2)


def test_an_aborted_request_frees_blocks_that_a_later_step_may_take() -> None:
    """Every stage runs the steps in one order, so that a block is free for the steps that come after."""
    prompts = prompts_of(6, 40)
    core = core_of(prompts, 40, pipeline_parallel_size=3, async_scheduling=False)
    for _ in range(12):
        core.step()
    assert len(core._in_flight) == 2
    in_flight = [int(slot) for step, _, _ in core._in_flight for slot in step.plan.slots]
    names = [core.scheduler._slots.at(slot).core.request_id for slot in in_flight]
    used = core.stats().kv_blocks_used
    core.abort(names)
    assert core.stats().kv_blocks_used < used
    core.reset_prefix_cache()
    core.add(sim.request("late", prompts[0], params=SamplingParams(temperature=0.0, max_tokens=40)))
    tokens = run(core)
    assert tokens["late"] == sim.expected(prompts[0], 40)
    for i, prompt in enumerate(prompts):
        if f"r{i}" not in names:
            assert sim.expected(prompt, 40)[-len(tokens[f"r{i}"]) :] == tokens[f"r{i}"]


def test_the_bubble_is_what_stages_did_not_compute() -> None:
    clock = PipelineClock(2)
    assert clock.bubble == 0.0
    clock.launched(10.0)
    clock.launched(10.5)
    clock.ended(12.0, 1.0, more=True)
    clock.ended(13.0, 2.0, more=False)
    clock.launched(20.0)  # nothing was under way since: nobody waited for a stage
    clock.ended(21.0, 1.5, more=False)
    assert clock.stage_seconds == 4.5
    assert clock.total_seconds == 8.0
    assert clock.bubble == pytest.approx(1 - 4.5 / 8)
