"""Drafts that the workers make with a model: for whom, how many, and in which blocks."""

from __future__ import annotations

import numpy as np

from octavo.engine.draft_stops import DraftStops
from octavo.engine.drafting import Drafting
from octavo.engine.request import Request
from octavo.engine.slots import Slots
from octavo.kv.draft_blocks import DraftBlocks
from octavo.speculative.step_times import mean_of_late
from octavo.step_messages import DraftOrder, StepPlan, StepResult

PRIOR_COST = 0.3  # of a plain step, that making one draft for all takes, until that was measured
_PRIOR_ROW = 0.02  # of that, that computing one token of a text in the draft's cache takes
# Orders: for so many nobody gets a draft's first blocks after there were none, and a request that is not in
# any of so many gives its own back where others wait, or in the end.
_PAUSE, _IDLE, _UNUSED = 32, 16, 256
# Steps that go by without a thought after one for which nothing paid, if they have as many requests: thinking
# takes the host 0.2 ms.
_RESTS = 7


class WorkerDrafting(Drafting):
    """Owns the draft's blocks, and how many tokens the workers have drafted for each request.

    What a step's workers draft is judged by the request's next step; neither waits for the host. Requests
    whose tokens are drawn under a mask are not drafted for: the mask would have to wait for the drafts.
    """

    def __init__(
        self,
        blocks: DraftBlocks,
        slots: Slots,
        most: int,
        adaptive: bool,
        max_rows: int,
        max_batch: int,
        max_length: int,
        stops: DraftStops | None = None,
    ):
        """
        Args:
            max_batch: rows of a step (`max_num_batched_tokens`).
            max_length: tokens of the longest text that the draft takes.
            stops: ends drafts for lack of confidence; None: they are as long as they were ordered. With it,
                the next step is planned when it is known where they ended.
        """
        super().__init__(slots, 1, most, adaptive, max_rows)
        num_slots = len(slots.num_tokens)
        self._blocks, self._max_batch, self._max_length = blocks, max_batch, max_length
        self._made = np.zeros(num_slots, np.int32)  # drafts that stand behind the newest token
        self._valid = np.zeros(num_slots, np.int64)  # tokens that the draft's cache has, at least
        self._follows = np.zeros(num_slots, bool)  # it needs just the newest
        self._cost: np.ndarray = np.full(num_slots + 1, np.nan)  # seconds of one draft each, by requests
        self._cost_count = np.zeros(num_slots + 1, np.int64)
        self._row_cost, self._row_count = np.nan, 0  # seconds of one token of a text
        # The last result's step, its order, and whether it took longer to be recorded.
        self._told: tuple[int, DraftOrder | None, bool] = -1, None, False
        self._orders = 0
        self._last_order = np.zeros(num_slots, np.int64)  # in which a slot's request was drafted for
        self._resumes = 0  # the order from which on first blocks are given
        self._rests, self._rests_with = 0, 0  # steps of so many requests that are not thought about
        self._stops = stops
        self._must: tuple[float, float] | None = (
            None  # what drafts of the next order must promise; None: a trial
        )

    def propose(self, run: np.ndarray, rows: np.ndarray, budget: int) -> None:
        """See `Drafting`."""
        slots = self.slots
        drafts = np.where(rows == 1, self._made[run], 0)
        drafts = np.minimum(drafts, np.maximum(slots.max_total[run] - slots.num_tokens[run] - 1, 0))
        budget = min(budget, max(0, self.max_rows - len(run)))
        drafts = np.clip(budget - (np.cumsum(drafts) - drafts), 0, drafts)
        slots.num_drafts[run] = drafts
        rows += drafts.astype(np.int32)

    def plan_next(self, slots: np.ndarray, rows: np.ndarray, samples: np.ndarray) -> DraftOrder | None:
        """See `Drafting`."""
        state = self.slots
        known = state.num_tokens[slots].astype(np.int64)
        counts = self._counts(slots, samples & ~state.masked[slots], known, int(samples.sum()))
        self._begin_order()
        for i in np.flatnonzero(counts).tolist():
            if not self._room(int(slots[i]), int(known[i] + counts[i] - 1)):
                self._drop(int(slots[i]))
                counts[i] = 0
        chosen = counts > 0
        self._last_order[slots[chosen]] = self._orders
        behind = self._behind(slots, known)[chosen].sum()
        self._made[slots[samples]] = counts[samples]
        self._follows[slots[samples]] = chosen[samples]
        self._valid[slots[chosen]] = known[chosen] - state.in_doubt[slots[chosen]]
        if not chosen.any():
            return None
        updates = self._blocks.take_updates()
        return DraftOrder(counts.astype(np.int32), updates, int(behind), thresholds=self._thresholds())

    def _begin_order(self) -> None:
        """Another step's order; what nobody has drafted in for long is given back."""
        self._orders += 1
        if self._orders % _UNUSED == 0:
            for slot in np.flatnonzero(self._last_order <= self._orders - _UNUSED).tolist():
                if self._blocks.held_by(slot):
                    self._drop(slot)

    def _room(self, slot: int, num_tokens: int) -> bool:
        """Give a slot blocks for so many tokens if that leaves every running request its next ones."""
        blocks = self._blocks
        if not blocks.held_by(slot) and self._orders < self._resumes:
            return False
        if blocks.extend(slot, num_tokens, len(self.slots.running)):
            return True
        self._resumes = self._orders + _PAUSE
        return False

    def give_back(self, count: int, may_draft: bool = False) -> int:
        """See `Drafting`. Who has not been drafted for the longest gives first, then the newest request."""
        blocks, freed = self._blocks, 0
        if count <= 0 or not blocks.num_held:
            return 0
        keep = blocks.kept if may_draft else 0
        holders = [slot for slot in self.slots.running[::-1].tolist() if blocks.held_by(slot)]
        for slot in sorted(holders, key=lambda slot: int(self._last_order[slot])):
            idle = self._last_order[slot] <= self._orders - _IDLE
            if freed >= count or (blocks.num_held <= keep and not idle):
                break
            freed += blocks.held_by(slot)
            self._give_up(slot)
        if freed:
            self._resumes = self._orders + _PAUSE
        return freed

    def _give_up(self, slot: int) -> None:
        """A slot's blocks are needed elsewhere."""
        self._drop(slot)

    def _thresholds(self) -> tuple[float, float] | None:
        """Of the order that is being made."""
        return None if self._stops is None else self._stops.thresholds(self._must)

    def _counts(self, slots: np.ndarray, able: np.ndarray, known: np.ndarray, others: int) -> np.ndarray:
        """Tokens to draft for each request, int64 `[n]`: for those that are `able` as many as pay and fit.

        Args:
            others: rows that the next step has without drafts, of those that are able, too.
        """
        room = np.where(able, self.slots.max_total[slots] - known - 1, 0)
        room = np.minimum(room, self._max_length - known + 1)  # the last draft is no input
        return np.clip(self._choose(slots, room > 0, known, others), 0, np.maximum(room, 0))

    def _behind(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Tokens that the draft's cache lacks of each text, but for the last two."""
        return np.where(self._follows[slots], 0, np.maximum(known - 2 - self._valid[slots], 0))

    def _choose(self, slots: np.ndarray, able: np.ndarray, known: np.ndarray, others: int) -> np.ndarray:
        """How many tokens to draft for each request, int64 `[n]`; arguments as `_counts` takes them."""
        none = np.zeros(len(slots), np.int64)
        self._must = None
        n = int(able.sum())
        fitting = (min(self.max_rows, self._max_batch) - others) // n if n else 0
        most = min(self.most, fitting)
        if most <= 0:
            return none
        wanted = able.astype(np.int64)
        if not self.adaptive:
            return wanted * most
        if self._rests and others == self._rests_with:
            self._rests -= 1
            return none
        curve = self.adaptation.times.curve(others, n * most + 1)
        if curve is None or len(curve) <= n * most or not self.adaptation.times.knows(others):
            return none  # until a plain step was measured
        plain = float(curve[0])
        odds = self.adaptation.acceptance.odds(slots[able], self.kinds[slots[able]])[:, :most]
        tokens = others + np.concatenate(([0.0], np.cumsum(odds.sum(axis=0))))
        rows, passes = self._lengths(n, most)
        seconds = np.interp(rows, np.arange(len(curve)), curve) + self._drafting_seconds(n, passes, plain)
        rates = tokens / seconds
        best = int(rates.argmax())
        behind = self._behind(slots, known)
        row_cost = _PRIOR_ROW * plain if self._row_count < 2 else self._row_cost
        if best:
            row = float(curve[best * n] - plain) / (best * n)
            run = float(self._drafting_seconds(n, np.array([best]), plain)[0]) / (best * n)
            follows = float(odds[:, best - 1].mean()) ** (1 / best)  # a draft one that stands
            self._must = row * float(rates[best]), (row + run) * float(rates[best]) / follows
            # What catching up costs must be won back in what the request has left, as far as is known.
            gain = (1 - rates[0] / rates[best]) * plain / n
            left = (self.slots.max_total[slots] - known) / 2
            return wanted * best * (behind * row_cost <= left * gain)
        trial = int(np.where(able, behind, np.iinfo(np.int64).max).argmin())
        cost = float(self._drafting_seconds(1, np.array([most]), plain)[0]) + behind[trial] * row_cost
        cost += float(curve[most] - curve[0])
        if self.adaptation.spend(cost):
            none[trial] = most
        else:
            self._rests, self._rests_with = _RESTS, others
        return none

    def _lengths(self, n: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Of orders of 0, 1, … `most` tokens for each of n requests: how many drafts come of them, and how
        many passes of the draft they take, `[most + 1]` each."""
        if self._stops is None:
            return n * np.arange(most + 1), np.arange(most + 1)
        kept, passes = self._stops.kept[:most], self._stops.passes[:most]
        return n * np.append(0.0, np.cumsum(kept)), np.append(0.0, np.cumsum(passes))

    def drafted(self, plan: StepPlan, live: np.ndarray, result: StepResult) -> None:
        """See `Drafting`."""
        order, made = plan.propose, result.drafted
        if self._stops is None or order is None or made is None or result.products is None:
            return
        told = np.flatnonzero(live & (made >= 0))
        slots = plan.slots[told]
        self._made[slots] = made[told]
        self._stops.ended(slots, order.counts[told], made[told], result.products[told])
        # Those that ended at once are not judged, and yield nothing.
        none = slots[made[told] == 0]
        one, nothing = np.ones(len(none), np.int32), np.zeros(len(none), np.int32)
        self.adaptation.acceptance.judged(none, self.kinds[none], one, nothing)

    def learn(self, slots: np.ndarray, drafted: np.ndarray, stood: np.ndarray) -> None:
        """See `Drafting`."""
        super().learn(
            slots, drafted if self._stops is None else self._stops.judged(slots, drafted, stood), stood
        )

    def _drafting_seconds(self, n: int, counts: np.ndarray, plain: float) -> np.ndarray:
        """How long drafting takes, float64 `[m]`.

        Args:
            n: requests that are drafted for.
            counts: `[m]`, passes of the draft, or tokens drafted in one.
            plain: seconds of a step of n requests without drafts.
        """
        known = np.flatnonzero(self._cost_count > 1)  # the first may have taken compiling and recording
        one = float(np.interp(n, known, self._cost[known])) if len(known) else PRIOR_COST * plain
        return counts * one

    def _took(self, counts: np.ndarray, seconds: float) -> None:
        """Drafting `counts` (int32 `[n]`) tokens, with no text to catch up with, took so long."""
        n, most = int((counts > 0).sum()), int(counts.max())
        self._cost_count[n] += 1
        self._cost[n] = mean_of_late(float(self._cost[n]), seconds / most, int(self._cost_count[n]))

    def timed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """See `Drafting`."""
        own = plan.step_id, plan.propose, result.recorded
        step, order, recorded = self._told if result.draft_step >= 0 else own
        self._told = own
        known = result.draft_step in (-1, step)
        if known and recorded:  # nor does it tell how much of this step's time drafting before it took
            self.adaptation.passed(seconds)
            return
        super().timed(plan, result, seconds)
        if not known or order is None or not result.draft_seconds or not order.counts.any():
            return
        passes = order.counts
        if result.products is not None and result.draft_step < 0:
            passes = (result.products > 0).sum(axis=1)
        n, most = int((passes > 0).sum()), passes.max(keepdims=True).astype(np.int64)
        spent = result.draft_seconds - float(self._drafting_seconds(n, most, 0.0)[0])
        if order.catch_up and spent > 0:
            self._row_count += 1
            self._row_cost = mean_of_late(self._row_cost, spent / order.catch_up, self._row_count)
        else:  # or catching up and drafting took less than drafting is known to take
            self._took(passes, result.draft_seconds)

    def _drop(self, slot: int) -> None:
        self._blocks.release(slot)
        self._valid[slot] = 0
        self._follows[slot] = False

    def enter(self, request: Request) -> None:
        """See `Drafting`."""
        super().enter(request)
        self._made[request.slot] = 0
        self._follows[request.slot] = False
        self._last_order[request.slot] = self._orders

    def leave(self, request: Request) -> None:
        """See `Drafting`."""
        self._drop(request.slot)
