"""Random mixes of all that can happen to requests, over the pretend model: tokens, reports and counts.

Each seed draws its own settings and about fifty requests (long and short, sharing beginnings, with
priorities, stop tokens and log-probabilities), aborts, cache resets and steps that fail at launch or later.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.errors import EngineDeadError
from octavo.messages import CoreOutput, CoreRequest
from octavo.sampling_params import SamplingParams
from octavo.step_messages import StepPlan, TokenLogprobs
from tests.engine import simulation as sim


class _Failed:
    def __init__(self, executor: Reporting):
        self.executor = executor

    def wait(self):
        self.executor.unseen -= 1
        self.executor.host.step_failed = True
        raise RuntimeError("pretend failure, seen late")


class Reporting(sim.PretendExecutor):
    """Also reports log-probabilities (minus the token, so that they can be told apart), and fails late."""

    late_failures: frozenset[int] = frozenset()
    failures: frozenset[int] = frozenset()
    unseen = 0  # failed steps that the engine does not know of yet

    def execute(self, plan: StepPlan):
        self.fail_at = plan.step_id if plan.step_id in self.failures else None
        try:
            done = super().execute(plan)
        except EngineDeadError as error:
            if not self.unseen:
                raise
            raise RuntimeError("computed on what a failed step left") from error
        if plan.step_id in self.late_failures:
            self._spoil(plan)
            self.unseen += 1
            return _Failed(self)
        n = len(plan.slots)
        done.result.logprobs = [
            [_entry(token) for token in done.result.tokens[i, : done.result.num_tokens[i]]]
            if plan.samples[i]
            else None
            for i in range(n)
        ]
        done.result.prompt_logprobs = [self._prompt_part(plan, i) for i in range(n)]
        return done

    def _spoil(self, plan: StepPlan) -> None:
        """The rows of a failed step hold nothing."""
        for slot, start, rows in zip(plan.slots, plan.start, plan.num_rows, strict=True):
            for group in range(len(self.tables)):
                for _, place in self.places(group, slot, start, start + rows):
                    self.cache[place] = (group, ())

    def _prompt_part(self, plan: StepPlan, i: int) -> list[TokenLogprobs] | None:
        if plan.prompt_logprobs is None or plan.prompt_logprobs[i] < 0:
            return None
        slot, start = plan.slots[i], int(plan.start[i])
        ends = min(start + int(plan.num_rows[i]), self.prompt_lens[int(slot)] - 1)
        return [_entry(self.tokens[slot, p + 1]) for p in range(start, ends)]

    @property
    def prompt_lens(self) -> dict[int, int]:
        return {a.slot: a.prompt_len for plan in self.plans for a in plan.admissions}


def _entry(token: int) -> TokenLogprobs:
    return TokenLogprobs([int(token)], [-float(token)], 1)


# Of each KV group; blocks have 8 or 16 tokens.
WINDOWS: list[tuple[int | None, ...]] = [
    (None,), (None,), (None, None), (5,), (None, 8), (8, 17), (None, 1, 16, 16), (24, None, 3),
]  # fmt: skip


def _engine(draw: random.Random, num_blocks: int, block_size: int, stages: int) -> EngineCore:
    speculative: dict[str, Any] = {}
    if draw.random() < 0.4:
        drafts = {
            "method": "ngram",
            "num_speculative_tokens": draw.randint(1, 9),
            "adaptive": draw.random() < 0.3,
        }
        speculative = dict(speculative_config=drafts)
    config = EngineConfig(
        block_size=block_size,
        max_num_seqs=draw.choice([1, 2, 4, 8]),
        max_num_batched_tokens=draw.choice([1, 2, 7, 16, 64]),
        async_scheduling=draw.random() < 0.6,
        scheduling_policy=draw.choice(["fcfs", "priority"]),
        enable_prefix_caching=draw.random() < 0.75,
        long_prefill_token_threshold=draw.choice([0, 0, 1, 5]),
        look_ahead_admission=draw.random() < 0.3,
        check_invariants=True,
        pipeline_parallel_size=stages,
        **speculative,
    )
    windows = draw.choice(WINDOWS)
    blocks = num_blocks * len(windows)
    if any(windows):  # down to what one request of one block needs
        blocks = draw.randint(len(windows), blocks)
    host_blocks = draw.choice([0, 0, 1, 5, 20, 200])
    disk = host_blocks > 0 and config.enable_prefix_caching and draw.random() < 0.5
    executor = Reporting(config, blocks, 60, windows, host_blocks, disk)
    disturb(draw, executor)
    core = EngineCore(config, executor)
    if speculative:
        sim.draft(core, sim.Guesser(draw.choice([0.0, 0.5, 0.95]), draw.randrange(1000)))
    return core


def disturb(draw: random.Random, executor: Reporting) -> None:
    """Copies, reads and writes that take some steps, and some that fail, as steps may, too."""
    most, rate = draw.choice([0, 1, 4]), draw.choice([0, 0, 0.2])
    for tier in (executor.host, executor.disk):
        if tier is not None:
            tier.delay = lambda: draw.randint(0, most)
            tier.fails = lambda: draw.random() < rate
    if draw.random() < 0.3:
        executor.failures = frozenset(draw.sample(range(60), 3))
        executor.late_failures = frozenset(draw.sample(range(60), 3))


def _request(draw: random.Random, name: str, stem: list[int], room: int) -> CoreRequest:
    length = draw.randint(1, draw.choice([4, room - 1]))
    prompt = stem[:length] if draw.random() < 0.8 else draw.choices(range(sim.VOCAB), k=length)
    count = draw.randint(1, min(room - length + 1, draw.choice([8, 50])))
    fields: dict = {}
    if draw.random() < 0.3:
        fields["logprobs"] = 0
    if draw.random() < 0.3:
        fields["prompt_logprobs"] = 0
    if draw.random() < 0.3:
        fields |= dict(stop_token_ids=draw.sample(range(sim.VOCAB), 60), min_tokens=draw.randint(0, count))
    params = SamplingParams(max_tokens=count, temperature=0.0, **fields)
    more = dict(priority=draw.randint(-3, 3), stream=draw.random() < 0.7, cache_salt=draw.choice([None, "a"]))
    return sim.request(name, prompt, params=params, **more)


@pytest.mark.parametrize("seed", range(90))
def test_random_mix(seed):
    draw = random.Random(seed)
    block_size, num_blocks = draw.choice([8, 16]), draw.choice([3, 4, 6, 10])
    check_mix(draw, _engine(draw, num_blocks, block_size, stages=1 if seed < 60 else 2 + seed % 3))


def check_mix(draw: random.Random, core: EngineCore) -> None:
    """Run a random mix of requests, aborts and resets, and check all that comes of it."""
    stems = [draw.choices(range(sim.VOCAB), k=60) for _ in range(2)]
    requests: dict[str, CoreRequest] = {}
    outputs: dict[str, list[CoreOutput]] = defaultdict(list)
    live: set[str] = set()

    def take(news: list[CoreOutput]) -> None:
        for output in news:
            assert output.request_id in live, "news of a request that has ended"
            outputs[output.request_id].append(output)
            if output.finish_reason:
                live.discard(output.request_id)

    for _ in range(80):
        for _ in range(draw.choice([0, 0, 1, 2]) if len(requests) < 50 else 0):
            name = f"r{len(requests)}"
            requests[name] = _request(draw, name, draw.choice(stems), min(59, core.facts.kv_capacity))
            core.add(requests[name])
            live.add(name)
        if live and draw.random() < 0.08:
            take(core.abort(draw.sample(sorted(live), draw.randint(1, len(live)))))
        if draw.random() < 0.03:
            core.reset_prefix_cache()
        take(core.step())
    for _ in range(20_000):
        if not core.has_work:
            break
        take(core.step())
    stats = core.stats()
    assert not live
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    done = [(requests[name], news) for name, news in outputs.items()]
    for request, news in done:
        _check(request, news)
    assert stats.generation_tokens == sum(len(sim.tokens_of(news)) for _, news in done)
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r, news in done if sim.tokens_of(news))
    assert not core.scheduler._slots.stop_uses.any()


def _check(request: CoreRequest, news: list[CoreOutput]) -> None:
    """One request's news, of which only the last ends it."""
    tokens, params, last = sim.tokens_of(news), request.params, news[-1]
    assert tokens == sim.expected(request.prompt_token_ids, len(tokens))
    assert [output for output in news if output.finish_reason] == [last]
    assert last.metrics is not None
    assert bool(tokens) == (last.metrics.first_token_time > 0)
    ends = np.flatnonzero(np.isin(tokens, params.stop_token_ids or [])) + 1
    ends = [int(place) for place in ends if place >= params.min_tokens]
    if last.finish_reason == "length":
        assert len(tokens) == params.max_tokens
    if last.finish_reason == "stop":
        assert ends == [len(tokens)]
    if params.logprobs is not None and tokens:
        assert [entry.ids[0] for output in news for entry in output.logprobs or []] == tokens
    if params.prompt_logprobs is not None and tokens:
        [told] = [output.prompt_logprobs for output in news if output.prompt_logprobs is not None]
        assert told[0] is None
        assert [entry.ids[0] for entry in told[1:]] == request.prompt_token_ids[1:]
