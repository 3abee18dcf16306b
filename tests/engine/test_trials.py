"""Requests that make a step fail end with an error, once; all others get the tokens they would have got."""

from __future__ import annotations

import random

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.step_messages import StepPlan
from tests import tiny
from tests.engine import simulation as sim
from tests.engine.simulation import expected, make_core, request, run, tokens_of
from tests.engine.test_random_mixes import Reporting, _Failed


class Poisoned(Reporting):
    """Fails at each step that computes a row of a poisonous token, at launch or later."""

    poison: frozenset[int] = frozenset()
    late = False
    failed = 0
    passing: frozenset[int] = frozenset()  # steps that fail whatever is in them

    def execute(self, plan: StepPlan):
        self._take_in(plan)
        rows = zip(plan.slots.tolist(), plan.start.tolist(), plan.num_rows.tolist(), strict=True)
        bad = any(self.poison & set(self._texts[s][a : a + n]) for s, a, n in rows)
        if not bad and plan.step_id not in self.passing:
            done = super().execute(plan)
            for i, slot in enumerate(plan.slots.tolist()):
                if plan.samples[i]:
                    self._texts[slot] = [*self._texts[slot], int(done.result.tokens[i, 0])]
            return done
        self.failed += 1
        if self.late:
            self.late_failures = frozenset([plan.step_id])
            done = super().execute(plan)
            assert isinstance(done, _Failed)
            return done
        self.failures = frozenset([plan.step_id])
        return super().execute(plan)

    def _take_in(self, plan: StepPlan) -> None:
        self._texts = getattr(self, "_texts", {})
        for a in plan.admissions:
            self._texts[a.slot] = a.token_ids.tolist()


def poisoned(late: bool = False, num_blocks: int = 64, windows=(None,), num_host_blocks=0, **settings):
    plain = make_core(num_blocks, 200, windows, num_host_blocks, **settings)
    config = plain.config
    executor = Poisoned(config, num_blocks, 200, windows, num_host_blocks)
    executor.late = late
    return EngineCore(config, executor)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(sim.VOCAB - 1), k=draw.randint(3, 40)) for _ in range(count)]


POISON = sim.VOCAB - 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(None,), (9, None)], ids=str)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [26, 64])
def test_two_poisoned_requests_of_nine_fail_alone(late, overlap, windows, caching, num_blocks):
    core = poisoned(late, num_blocks, windows, 40, async_scheduling=overlap, enable_prefix_caching=caching)
    core.executor.poison = frozenset([POISON])
    work = {f"r{i}": prompt for i, prompt in enumerate(prompts(9))}
    for name in ("r2", "r7"):
        work[name].insert(len(work[name]) // 2, POISON)
    for name, prompt in work.items():
        core.add(request(name, prompt, 12))
    outputs = run(core)
    for name, prompt in work.items():
        ends = [output for output in outputs[name] if output.finish_reason]
        assert ends == outputs[name][-1:]
        if POISON in prompt:
            assert ends[0].finish_reason == "error" and "pretend failure" in ends[0].error
            assert not tokens_of(outputs[name])
        else:
            assert ends[0].finish_reason == "length"
            assert tokens_of(outputs[name]) == expected(prompt, 12)
    assert 2 <= core.executor.failed <= 12
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("late", [False, True])
def test_poison_that_a_request_makes_itself(late):
    """The tokens before it have been told, and are not told again."""
    work = {f"r{i}": prompt for i, prompt in enumerate(prompts(6))}
    answers = {name: expected(prompt, 30) for name, prompt in work.items()}
    token = answers["r3"][17]
    assert not any(token in answers[name] + work[name] for name in work if name != "r3")
    core = poisoned(late)
    core.executor.poison = frozenset([token])
    for name, prompt in work.items():
        core.add(request(name, prompt, 30))
    outputs = run(core)
    for name in work:
        told = tokens_of(outputs[name])
        assert told == (answers[name][:18] if name == "r3" else answers[name])
    assert outputs["r3"][-1].finish_reason == "error"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_that_passes_ends_nobody(overlap):
    core = poisoned(async_scheduling=overlap)
    core.executor.passing = frozenset([4])
    work = {f"r{i}": prompt for i, prompt in enumerate(prompts(5))}
    for name, prompt in work.items():
        core.add(request(name, prompt, 20))
    outputs = run(core)
    for name, prompt in work.items():
        assert tokens_of(outputs[name]) == expected(prompt, 20)
    assert core.executor.failed == 1 and core.stats().num_preemptions > 0


def test_requests_go_while_they_are_under_trial_and_new_ones_wait_for_its_end():
    core = poisoned()
    core.executor.poison = frozenset([POISON])
    work = {f"r{i}": [*prompt, POISON] if i < 4 else prompt for i, prompt in enumerate(prompts(8))}
    for name, prompt in work.items():
        core.add(request(name, prompt, 5))
    core.step()
    assert core.executor.failed == 1
    core.add(request("new", [1, 2, 3], 5))
    gone = core.abort(["r0", "r1", "r2", "r3", "r5"])
    assert sorted(output.request_id for output in gone) == ["r0", "r1", "r2", "r3", "r5"]
    outputs = run(core)
    assert sorted(outputs) == ["new", "r4", "r6", "r7"]
    for name, news in outputs.items():
        assert tokens_of(news) == expected(work.get(name, [1, 2, 3]), 5)
    assert core.executor.failed == 1


def test_the_cause_in_a_real_model(monkeypatch: pytest.MonkeyPatch):
    from octavo.layers.embedding import VocabEmbedding
    from octavo.worker.recorded_steps import RecordedSteps

    right = VocabEmbedding.forward
    answers = [tiny.greedy("llama", i) for i in range(len(tiny.PROMPTS))]
    token = next(t for t in answers[1][5:] if not any(t in a + p for a, p in others(answers, 1)))

    def forward(self, token_ids):
        if (token_ids == token).any():
            raise RuntimeError("injected")
        return right(self, token_ids)

    monkeypatch.setattr(VocabEmbedding, "forward", forward)
    monkeypatch.setattr(RecordedSteps, "takes", lambda *_: False)  # these run no Python
    config = EngineConfig(
        str(tiny.checkpoint("llama")), dtype="float32", device="cpu", num_threads=1,
        kv_cache_memory_bytes=8 << 20, check_invariants=True,
    )  # fmt: skip
    core = EngineCore(config)
    for i, prompt in enumerate(tiny.PROMPTS):
        core.add(request(str(i), prompt, len(answers[i])))
    outputs = run(core)
    core.close()
    for i, answer in enumerate(answers):
        if i != 1:
            assert tokens_of(outputs[str(i)]) == answer
    assert tokens_of(outputs["1"]) == answers[1][: answers[1].index(token) + 1]
    assert outputs["1"][-1].error == "RuntimeError: injected"


def others(answers, index):
    return [(a, p) for i, (a, p) in enumerate(zip(answers, tiny.PROMPTS, strict=True)) if i != index]
