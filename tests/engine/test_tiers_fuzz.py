"""Everything that can happen to requests and blocks, in any order: pool, tiers and scheduler stay sound.

The engine runs over the pretend model; invariants are checked after every step, and that every block that can
be found, on the device, in host memory or on disk, holds what its key says. Tokens are the model's own.
"""

from __future__ import annotations

import logging
import os
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.messages import CoreOutput, CoreRequest
from octavo.sampling_params import SamplingParams
from tests.engine import simulation as sim
from tests.engine.test_random_mixes import Reporting

SALTS = (None, "a")
FUZZ_STEPS = int(os.environ.get("OCTAVO_FUZZ_STEPS", "100000"))


@dataclass
class Setup:
    """Of one engine: everything is small, so that everything happens often."""

    num_blocks: int = 9
    num_host_blocks: int = 7
    windows: tuple[int | None, ...] = (None,)
    disk: bool = False
    caching: bool = True
    overlap: bool = True
    budget: int = 16
    look_ahead: bool = False
    seqs: int = 3
    stages: int = 1
    threshold: int = 0
    drafts: int = 0


@dataclass
class World:
    """An engine under test, what was asked of it, and what it said."""

    setup: Setup
    requests: dict[str, CoreRequest] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: int = 0

    def __post_init__(self) -> None:
        setup = self.setup
        config = EngineConfig(
            block_size=8, max_num_seqs=setup.seqs, max_num_batched_tokens=setup.budget, check_invariants=True,
            async_scheduling=setup.overlap, enable_prefix_caching=setup.caching,
            scheduling_policy="priority", look_ahead_admission=setup.look_ahead,
            pipeline_parallel_size=setup.stages, long_prefill_token_threshold=setup.threshold,
            speculative_config=dict(method="ngram", num_speculative_tokens=setup.drafts, adaptive=False)
            if setup.drafts else None,
        )  # fmt: skip
        groups = len(setup.windows)
        self.executor = Reporting(
            config, setup.num_blocks * groups, 48, setup.windows, setup.num_host_blocks, setup.disk
        )
        self.core = EngineCore(config, self.executor)
        if setup.drafts:
            sim.draft(self.core, sim.Guesser(0.6))
        self.stems = [[7 * i + j for j in range(48)] for i in range(3)]
        self.names = 0

    def submit(
        self, stem: int, length: int, count: int, priority: int, salt: str | None, choices: int = 1
    ) -> None:
        """A request whose text may begin as others' do, once for each of its choices."""
        facts = self.core.facts
        count = min(count, facts.kv_capacity)
        length = min(length, facts.kv_capacity - count + 1, facts.max_model_len - count)
        for _ in range(choices):
            name = f"r{self.names}"
            self.names += 1
            params = SamplingParams(max_tokens=count, temperature=0.0)
            more = dict(priority=priority, cache_salt=salt)
            self.requests[name] = sim.request(name, self.stems[stem][:length], params=params, **more)
            self.tokens[name] = []
            self.core.add(self.requests[name])

    def abort(self, which: int) -> None:
        """One of the live requests goes."""
        if self.requests:
            self.take(self.core.abort([sorted(self.requests)[which % len(self.requests)]]))

    def preempt(self, which: int) -> None:
        """One of the running requests gives up its blocks."""
        slots = self.core.scheduler._slots
        if len(slots.running):
            self.core.scheduler._preempt(slots.at(int(slots.running[which % len(slots.running)])))

    def fail(self, late: bool) -> None:
        """The next step fails, at launch or once it has been launched."""
        number = self.core.scheduler._maker.next_id
        if late:
            self.executor.late_failures = frozenset([number])
        else:
            self.executor.failures = frozenset([number])

    def disturb(self, delay: int, broken: bool) -> None:
        """From here on, copies, reads and writes take so many steps, and fail or not."""
        for tier in (self.executor.host, self.executor.disk):
            if tier is not None:
                tier.delay, tier.fails = (lambda: delay), (lambda: broken)

    def step(self) -> None:
        """One step of the engine, if it has anything to do."""
        if self.core.has_work:
            self.take(self.core.step())

    def take(self, outputs: list[CoreOutput]) -> None:
        """Hold what was said against the model."""
        for output in outputs:
            name = output.request_id
            self.tokens[name] += output.new_token_ids
            if output.finish_reason:
                request, tokens = self.requests.pop(name), self.tokens.pop(name)
                assert tokens == sim.expected(request.prompt_token_ids, len(tokens))
                assert output.finish_reason != "length" or len(tokens) == request.params.max_tokens
                self.ended += 1

    def check_contents(self) -> None:
        """Blocks hold what their keys say. What a failed step left is known to the engine first."""
        if not self.executor.unseen and self.setup.caching:
            sim.check_contents(self.core.kv, self.executor, SALTS)

    def drain(self) -> None:
        """Let everything end; nothing may be left."""
        self.disturb(0, False)
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.requests and not self.core.has_work
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert self.core.kv.pool.num_used == 0
        self.check_contents()


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)  # failures are asked for by the thousand
    yield
    logging.disable(logging.NOTSET)


class TiersMachine(RuleBasedStateMachine):
    """What hypothesis may do to a World."""

    setup = Setup(disk=True)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.setup)

    @rule(
        stem=st.integers(0, 2), length=st.integers(1, 40), count=st.integers(1, 20),
        priority=st.integers(0, 1), salt=st.sampled_from(SALTS), choices=st.integers(1, 3),
    )  # fmt: skip
    def submit(self, stem, length, count, priority, salt, choices):
        if len(self.world.requests) < 6:
            self.world.submit(stem, length, count, priority, salt, choices)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.world.step()

    @rule(which=st.integers(0, 5))
    def abort(self, which):
        self.world.abort(which)

    @rule(which=st.integers(0, 2))
    def preempt(self, which):
        self.world.preempt(which)

    @rule(late=st.booleans())
    def fail(self, late):
        self.world.fail(late)

    @rule(delay=st.integers(0, 5), broken=st.booleans())
    def disturb(self, delay, broken):
        self.world.disturb(delay, broken)

    @rule()
    def reset(self):
        self.world.core.reset_prefix_cache()

    @invariant()
    def contents(self):
        self.world.check_contents()

    def teardown(self):
        self.world.drain()


class PrivateTiersMachine(TiersMachine):
    """The same without sharing between requests, and with a window."""

    setup = Setup(caching=False, windows=(None, 9), num_host_blocks=15)


_SETTINGS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTiers = TiersMachine.TestCase
TestTiers.settings = _SETTINGS
TestPrivateTiers = PrivateTiersMachine.TestCase
TestPrivateTiers.settings = _SETTINGS


SETUPS = [
    Setup(),
    Setup(disk=True, num_host_blocks=4),
    Setup(caching=False, num_host_blocks=12),
    Setup(windows=(None, 9), overlap=False, budget=7, num_host_blocks=12, disk=True),
    Setup(windows=(17,), look_ahead=True, num_host_blocks=2),
    Setup(stages=3, disk=True, num_host_blocks=20),
    Setup(windows=(None, 24), stages=2, seqs=8, threshold=5, num_host_blocks=30),
    Setup(num_blocks=2, num_host_blocks=1, disk=True, seqs=1, budget=1),
    Setup(windows=(1, None, 5), num_blocks=3, drafts=3, seqs=4, num_host_blocks=9, disk=True),
    Setup(num_blocks=6, drafts=5, overlap=False, caching=False, num_host_blocks=4, budget=40),
]


@pytest.mark.parametrize("number", range(len(SETUPS)))
def test_a_long_run_of_everything(number):
    """100 000 steps over all setups."""
    draw = random.Random(number)
    world = World(SETUPS[number])
    steps = 0
    while steps < FUZZ_STEPS // len(SETUPS):
        for _ in range(200):
            steps += 1
            event = draw.random()
            if event < 0.22 and len(world.requests) < 6:
                world.submit(
                    draw.randrange(3), draw.randint(1, 40), draw.randint(1, 20), draw.randrange(2),
                    draw.choice(SALTS), draw.choice([1, 1, 1, 3]),
                )  # fmt: skip
            elif event < 0.26:
                world.abort(draw.randrange(6))
            elif event < 0.29:
                world.preempt(draw.randrange(3))
            elif event < 0.30:
                world.fail(draw.random() < 0.5)
            elif event < 0.32:
                world.disturb(draw.choice([0, 0, 1, 4]), draw.random() < 0.2)
            elif event < 0.322:
                world.core.reset_prefix_cache()
            world.step()
        world.check_contents()
        world.executor.plans.clear()
    world.drain()
    stats = world.core.stats()
    preemptions, copied = stats.num_preemptions, stats.host_blocks_in
    assert preemptions > steps / 200 and copied > steps / 1000 and stats.host_blocks_out > steps / 1000
    assert world.ended > steps / 50
