"""From the rows that were chosen for a step to the plan that the workers are sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from octavo.engine.drafting import Drafting
from octavo.engine.grammar_run import GrammarRun
from octavo.engine.slots import Slots
from octavo.engine.tables import TableChanges, block_updates, shared_blocks
from octavo.kv.manager import KVManager
from octavo.messages import ITERATION_BOUNDS, CoreStats
from octavo.step_messages import Admission, BlockCopies, StepPlan


@dataclass
class ScheduledStep:
    """A plan and what `update` needs to recognise requests that left their slot meanwhile."""

    plan: StepPlan
    epochs: np.ndarray
    grammars: list[GrammarRun] = field(default_factory=list)  # of the plan's masked requests


class StepMaker:
    """Makes plans, numbers them, and counts their rows and tokens as scheduled.

    Attributes:
        next_id: the number of the next plan.
    """

    def __init__(
        self,
        slots: Slots,
        kv: KVManager,
        drafting: Drafting | None,
        stats: CoreStats,
        vocab_size: int,
        find_shared: bool,
    ):
        """`find_shared`: whether to look for what all requests of a step share."""
        self._slots, self._kv, self._drafting, self._stats = slots, kv, drafting, stats
        self._vocab_size, self._find_shared = vocab_size, find_shared
        self.next_id = 0

    def make(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        admissions: list[Admission],
        updates: list[TableChanges],
        copies: Iterable[BlockCopies] = (),
    ) -> ScheduledStep:
        """Count the rows as scheduled, and say what the workers need for them.

        Args:
            slots: int64 `[n]`, each in the step once.
            counts: int32 `[n]`, rows of each.
            admissions: of the requests that have just come into their slots.
            updates: per KV group, new entries of block tables.
            copies: of blocks, that go with the step.
        """
        start = self._slots.num_computed[slots]
        self._slots.num_computed[slots] += counts
        drafting = self._drafting
        drafts = None if drafting is None else self._drafts(drafting, slots, counts)
        doubt = None if drafting is None else self._slots.in_doubt[slots]
        if drafts is not None:
            self._slots.num_tokens[slots] += drafts
            self._slots.in_doubt[slots] += drafts
        samples = self._slots.num_computed[slots] == self._slots.num_tokens[slots]
        self._slots.num_tokens[slots] += samples
        through = int(self._slots.sampled_in[slots].max(initial=-1))
        self._slots.sampled_in[slots[samples]] = self.next_id
        masked = np.flatnonzero(samples & self._slots.masked[slots])
        shared = 0
        if self._find_shared:
            shared = shared_blocks(self._slots, slots, counts, start, self._kv.block_size)
        plan = StepPlan(
            step_id=self.next_id,
            admissions=admissions,
            block_updates=block_updates(updates),
            slots=slots.astype(np.int32),
            num_rows=counts,
            start=start,
            samples=samples,
            prompt_logprobs=self._prompt_logprobs(slots),
            shared_blocks=shared,
            copies=list(copies),
            masked=masked.astype(np.int32) if len(masked) else None,
            num_drafts=drafts,
            draft_tokens=None if drafting is None or drafts is None else drafting.tokens(slots, drafts),
            propose=None if drafting is None else drafting.plan_next(slots, counts, samples),
            in_doubt=doubt,
            tokens_through=through,
        )
        grammars = self._expect_tokens(slots[masked])
        self._slots.register(slots, self._slots.num_computed[slots], self.next_id)
        self.next_id += 1
        if len(slots):
            self._stats.num_steps += 1
            self._stats.iteration_tokens.add(ITERATION_BOUNDS, plan.total_rows)
        return ScheduledStep(plan, self._slots.epoch[slots], grammars)

    def _drafts(self, drafting: Drafting, slots: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """How many of a step's rows judge drafts, int32 `[n]`; None: nobody's."""
        drafting.cut(slots, counts)
        drafts = self._slots.num_drafts[slots]
        return drafts if drafts.any() else None

    def _expect_tokens(self, masked: np.ndarray) -> list[GrammarRun]:
        """The grammars of slots whose tokens are being sampled; hard ones wait for the next token's mask."""
        grammars = []
        for slot in masked.tolist():
            grammar = self._slots.at(slot).grammar
            assert grammar is not None
            grammar.pending += 1
            if self._drafting is not None:
                drafts = self._drafting.tokens(np.array([slot]), self._slots.num_drafts[slot : slot + 1])
                grammar.drafts = [] if drafts is None else drafts.tolist()
            self._slots.held[slot] = grammar.slow
            grammars.append(grammar)
        return grammars

    def release_held(self) -> bool:
        """Let requests go on whose masks have been made; whether some still wait for theirs."""
        slots, waits = self._slots, False
        for slot in np.flatnonzero(slots.held).tolist():
            request = slots.requests[slot]
            slots.held[slot] = held = (
                request is not None and request.grammar is not None and request.grammar.is_awaited
            )
            waits |= held
        return waits

    def _prompt_logprobs(self, slots: np.ndarray) -> np.ndarray | None:
        if not self._slots.wants_prompt_logprobs[slots].any():
            return None
        wanted = np.full(len(slots), -1, np.int32)
        for i in np.flatnonzero(self._slots.wants_prompt_logprobs[slots]):
            request = self._slots.requests[int(slots[i])]
            assert request is not None and request.core.params.prompt_logprobs is not None
            top = request.core.params.prompt_logprobs
            wanted[i] = self._vocab_size if top == -1 else top
        return wanted
