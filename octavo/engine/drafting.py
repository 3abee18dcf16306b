"""Drafts of running requests: proposed before a step, cut to what may stand and pays, judged after it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import numpy as np

from octavo.engine.request import Request
from octavo.engine.slots import Slots
from octavo.messages import CoreStats
from octavo.speculative.adaptive import Adaptation
from octavo.speculative.proposer import NOTHING, HostProposer, Proposal
from octavo.step_messages import DraftOrder, StepPlan, StepResult


class Drafting(ABC):
    """Decides which rows of a step judge drafts; learns from the verifier how many pay.

    Attributes:
        alone: the next step is planned when all earlier ones have ended, so that their tokens are known.
        slack: seconds for which the host waited for the newest result: what it can do beside a step.
    """

    alone = False
    slack = 0.0

    def __init__(self, slots: Slots, num_kinds: int, most: int, adaptive: bool, max_rows: int):
        """
        Args:
            num_kinds: sorts of proposals (`octavo.speculative.proposer.Proposal`).
            most: drafts of a request.
            adaptive: False: always `most`.
            max_rows: rows of logits that a step may have, drafts included.
        """
        num_slots = len(slots.num_tokens)
        self.slots, self.most, self.adaptive, self.max_rows = slots, most, adaptive, max_rows
        self.adaptation = Adaptation(num_slots, num_kinds, most)
        self.kinds = np.zeros(num_slots, np.int64)
        slots.on_enter.append(self.enter)
        slots.on_leave.append(self.leave)

    def look_ahead(self, costs: bool) -> bool:
        """Set `alone` for the step that is planned next.

        Args:
            costs: being alone costs time: earlier steps have not ended yet, or there are pipeline stages for
                several steps at a time.
        """
        return self.alone

    def launched(self, idle: float) -> None:  # noqa: B027 (most make nothing that the host waits for)
        """A step was planned and is launched; the device had nothing to do for so many seconds before."""

    @abstractmethod
    def propose(self, run: np.ndarray, rows: np.ndarray, budget: int) -> None:
        """Set `Slots.num_drafts` of requests in slots `run`, and count their rows in.

        Args:
            run: int64 `[n]`; drafts are judged for requests that get one row.
            rows: int32 `[n]`, changed.
            budget: rows that drafts may take.
        """

    def tokens(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """The drafts of some requests one after another, int32 `[sum of counts]`; None: the workers have
        them."""
        return None

    def plan_next(self, slots: np.ndarray, rows: np.ndarray, samples: np.ndarray) -> DraftOrder | None:
        """What the workers draft after a step; None: nothing.

        Args:
            slots: int64 `[n]`, the step's requests, whose rows and tokens are counted already.
            rows: int32 `[n]`, of each.
            samples: bool `[n]`.
        """
        return None

    def give_back(self, count: int, may_draft: bool = False) -> int:
        """Free blocks of the pool that drafts hold, at least `count`, or what there are; returns how many.

        Args:
            may_draft: requests that are drafted for now keep what drafts may keep where memory is short.
        """
        return 0

    def cut(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Some requests got fewer rows than they were to have."""
        self.slots.num_drafts[slots] = np.minimum(self.slots.num_drafts[slots], np.maximum(rows - 1, 0))

    def judged(self, plan: StepPlan, live: np.ndarray, result: StepResult, stats: CoreStats) -> None:
        """Learn what the verifier said of a step's drafts.

        Args:
            live: bool `[n]`, requests of the plan that are still in their slots.
        """
        assert plan.num_drafts is not None
        chosen = np.flatnonzero(live & (plan.num_drafts > 0) & (result.num_tokens > 0))
        slots, drafted = plan.slots[chosen], plan.num_drafts[chosen]
        stood = result.num_tokens[chosen] - 1
        self.learn(slots, drafted, stood)
        stats.spec_drafts += len(chosen)
        stats.spec_draft_tokens += int(drafted.sum())
        stats.spec_accepted_tokens += int(stood.sum())
        by_position = (stood[:, None] > np.arange(self.most)).sum(0).tolist()
        stats.spec_accepted_per_pos = [
            a + b for a, b in zip(stats.spec_accepted_per_pos or [0] * self.most, by_position, strict=True)
        ]

    def learn(self, slots: np.ndarray, drafted: np.ndarray, stood: np.ndarray) -> None:
        """Drafts were judged: integer `[n]` each, how many there were, and how many leading ones stood."""
        self.adaptation.acceptance.judged(slots, self.kinds[slots], drafted, stood)

    def drafted(self, plan: StepPlan, live: np.ndarray, result: StepResult) -> None:  # noqa: B027
        """A step's drafts are there, if the workers made any.

        Args:
            live: bool `[n]`, requests of the plan that are still in their slots.
        """

    def timed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """A step took so long, its result included."""
        self.adaptation.passed(seconds)
        drafts = 0 if plan.num_drafts is None else plan.num_drafts
        rows = plan.total_rows  # 0: it asked for news of copies
        usual = rows > 0 and not plan.admissions and not result.recorded
        if (
            usual
            and seconds > result.draft_seconds
            and plan.samples.all()
            and (plan.num_rows == 1 + drafts).all()
        ):
            self.adaptation.times.add(rows, seconds - result.draft_seconds)

    def enter(self, request: Request) -> None:
        """A request has come into its slot."""
        self.adaptation.acceptance.enter(request.slot)

    def leave(self, request: Request) -> None:  # noqa: B027 (not every kind keeps something of a request)
        """A request leaves its slot."""


class HostDrafting(Drafting):
    """Owns a proposer on the host, and the drafts of the step that is being planned.

    Drafts are proposed from tokens that are known: no step that draws tokens is in flight meanwhile. Where
    the device computes beside the host, waiting for them leaves it idle: so, if only as many as pay are
    drafted, it is looked at what would be proposed behind the tokens that are known while a step is in
    flight. What is found there again is likely to be found one token later.
    """

    def __init__(self, proposer: HostProposer, slots: Slots, most: int, adaptive: bool, max_rows: int):
        super().__init__(slots, proposer.num_kinds, most, adaptive, max_rows)
        self._proposer = proposer
        self._tokens = np.zeros((len(slots.num_tokens), most), np.int32)
        self._spent = 0.0  # seconds that proposing for the next step took
        self.alone = True

    @property
    def _awake(self) -> bool:
        return not self.adaptive or self.adaptation.awake

    def look_ahead(self, costs: bool) -> bool:
        """See `Drafting`."""
        self.alone = self._awake
        if self.alone and costs and self.adaptive:
            self.alone = self._promising() and self._awake  # which looking may have ended
        return self.alone

    def _promising(self) -> bool:
        """Whether drafts behind the tokens that are known would be judged."""
        slots, begin = self.slots, time.thread_time()
        run = slots.running
        known = slots.num_known[run]
        room = slots.max_total[run] - known - 1
        kinds, counts, own = [], [], []
        for i in np.flatnonzero((slots.num_tokens[run] - slots.num_computed[run] <= 1) & (room > 0)).tolist():
            slot = int(run[i])
            proposal = self._proposal(slot, int(known[i]), min(self.most, int(room[i])))
            if len(proposal.tokens):
                own.append(slot)
                kinds.append(proposal.kind)
                counts.append(len(proposal.tokens))
        found = False
        if own:
            odds = self._odds(np.array(own), np.array(kinds), np.array(counts))
            found = self.adaptation.promises(odds, len(run), max(0, self.max_rows - len(run)))
        self.adaptation.looked(max(0.0, time.thread_time() - begin - self.slack))
        return found

    def launched(self, idle: float) -> None:
        """See `Drafting`."""
        if self._spent or idle:
            self.adaptation.proposed(max(idle, self._spent))
            self._spent = 0.0

    def propose(self, run: np.ndarray, rows: np.ndarray, budget: int) -> None:
        """See `Drafting`."""
        slots = self.slots
        slots.num_drafts[run] = 0
        if not self.alone or not self._awake or budget <= 0:
            return
        known = slots.num_known[run]
        room = slots.max_total[run] - known - 1
        chosen = np.flatnonzero((rows == 1) & (slots.num_tokens[run] == known) & (room > 0))
        if not len(chosen):
            return
        begin = time.thread_time()  # whatever else the machine does meanwhile
        counts, own = [], []
        for i in chosen.tolist():
            slot = int(run[i])
            count = self._propose_one(slot, int(known[i]), min(self.most, int(room[i])))
            if count:
                own.append(i)
                counts.append(count)
        if own:
            places, most = np.array(own, np.int64), min(budget, max(0, self.max_rows - len(run)))
            granted = self._grant(run[places], np.array(counts, np.int64), int(rows.sum()), most)
            slots.num_drafts[run[places]] = granted
            rows[places] += granted.astype(np.int32)
        self._spent += time.thread_time() - begin

    def _propose_one(self, slot: int, known: int, most: int) -> int:
        proposal = self._proposal(slot, known, most)
        count = len(proposal.tokens)
        self._tokens[slot, :count] = proposal.tokens
        self.kinds[slot] = proposal.kind
        return count

    def _proposal(self, slot: int, known: int, most: int) -> Proposal:
        """What a request's grammar allows of a continuation of its known tokens."""
        grammar = self.slots.at(slot).grammar
        if grammar is not None and grammar.slow:
            return NOTHING
        proposal = self._proposer.propose(slot, self.slots.tokens[slot, :known], most)
        if len(proposal.tokens) and grammar is not None:
            count = grammar.allowed(proposal.tokens.tolist())
            proposal = Proposal(proposal.tokens[:count], proposal.kind)
        return proposal

    def _odds(self, own: np.ndarray, kinds: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """How likely so many drafts of each request are to stand, float64 `[n, most]`; 0 beyond them."""
        odds = self.adaptation.acceptance.odds(own, kinds)
        odds[np.arange(self.most) >= counts[:, None]] = 0.0
        return odds

    def _grant(self, own: np.ndarray, counts: np.ndarray, rows: int, most: int) -> np.ndarray:
        """How many of each one's drafts are judged, int64 `[n]`."""
        if self.adaptive:
            return self.adaptation.choose(self._odds(own, self.kinds[own], counts), rows, most)
        before = np.cumsum(counts) - counts
        return np.clip(most - before, 0, counts)

    def tokens(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """See `Drafting`."""
        return self._tokens[slots][np.arange(self.most) < counts[:, None]]

    def enter(self, request: Request) -> None:
        """See `Drafting`."""
        super().enter(request)
        self._proposer.enter(request.slot)

    def leave(self, request: Request) -> None:
        """See `Drafting`."""
        lasting = request.done and request.core.cache_salt is None
        self._proposer.leave(request.slot, request.token_ids, request.prompt_len, lasting)
