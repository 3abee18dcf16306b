"""The scheduler: one rule decides which tokens are computed next.

A request has `num_tokens` (known, or being sampled by a step in flight) and `num_computed`. A step
gives requests some of the difference, under a budget. A prompt's chunk, the next token of a
running request and a recompute after preemption are the same thing: rows of one ragged batch.

State is arrays indexed by slot; a step touches only what changes. The scheduler runs ahead of the
device: `schedule` may be called again before `update` brought the last step's tokens, which count
as known from the moment their sampling is scheduled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

import numpy as np

from octavo.engine.admission import AdmissionControl
from octavo.engine.draft_choice import choose_drafting
from octavo.engine.drafting import Drafting
from octavo.engine.followers import Followers
from octavo.engine.grammar_run import GrammarRun
from octavo.engine.limits import SchedulerLimits
from octavo.engine.loading import LoadingRequests
from octavo.engine.micro_batches import MicroBatches
from octavo.engine.request import Request, extras_of
from octavo.engine.results import take_in
from octavo.engine.sharing import give, share
from octavo.engine.slots import Slots
from octavo.engine.step_maker import ScheduledStep, StepMaker
from octavo.engine.tables import (
    TableChanges,
    drop_drafts,
    extend,
    free_passed,
    give_back_spare,
    grow_by_one,
    keep_running,
    lacking_blocks,
)
from octavo.engine.trials import TrialQueue, Trials
from octavo.kv.draft_blocks import DraftBlocks
from octavo.kv.manager import KVManager
from octavo.messages import CoreOutput, CoreRequest, CoreStats
from octavo.speculative.proposer import HostProposer
from octavo.step_messages import Admission, StepPlan, StepResult


class Scheduler:
    """Owns the waiting queue, the slots and their state; decides steps and digests their results.

    Invariants (see `check`): a request is waiting, following, loading, in one slot, or done; a slot's rows
    scheduled never exceed its known tokens; tables hold every scheduled token; a token that was
    reported never changes.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        proposer: HostProposer | None = None,
        draft_blocks: DraftBlocks | None = None,
        draft_max_model_len: int = 0,
    ):
        """
        Args:
            proposer: drafts on the host.
            draft_blocks: those of a model that drafts on the workers, for texts of at most
                `draft_max_model_len` tokens.
        """
        self.limits = limits
        self.kv = kv
        self._slots = Slots(limits.max_num_seqs, limits.max_model_len, limits.vocab_size, kv)
        self._draft_blocks = draft_blocks
        self.drafting = choose_drafting(limits, self._slots, proposer, draft_blocks, draft_max_model_len)
        self._loading = LoadingRequests()
        self._followers = Followers(self._slots, kv.block_size)
        self._waiting = TrialQueue()
        self._trials = Trials(self._slots, self._waiting, self._loading, self._put_back)
        self._requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._paused = False  # a request waits for blocks that copies under way hold
        self.stats = CoreStats(kv_blocks_total=kv.pool.num_blocks)
        self._maker = StepMaker(
            self._slots, kv, self.drafting, self.stats, limits.vocab_size, limits.find_shared_prefix
        )
        self._micro = MicroBatches(self._slots, limits.pipeline_stages)
        self._admission = AdmissionControl(
            limits, kv, self._slots, self._waiting, self._loading, self._followers, draft_blocks,
            self._give_back_drafts, self.stats,
        )  # fmt: skip

    # ---- requests come and go -------------------------------------------------------------------

    def add(self, core: CoreRequest, grammar: GrammarRun | None = None) -> None:
        """Queue a request. The front end has checked it; ids of live requests must differ."""
        if core.request_id in self._requests:
            raise ValueError(f"request_id {core.request_id!r} is in use")
        order = (core.priority if self.limits.use_priority else 0, next(self._arrivals))
        stop_ids = frozenset(core.eos_token_ids) | frozenset(core.params.stop_token_ids or ())
        request = Request(
            core=core,
            order=order,
            token_ids=np.asarray(core.prompt_token_ids, np.int32),
            seq=self.kv.new_sequence(extras_of(core)),
            stop_ids=frozenset(t for t in stop_ids if t < self.limits.vocab_size),
            grammar=grammar,
        )
        request.metrics.arrival_time = core.arrival_time
        self._requests[core.request_id] = request
        self._waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """End requests now and free all they hold; unknown ids (already ended) are ignored."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                outputs.append(self._finish(request, "abort"))
        return outputs

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running, or has left what copies under way still touch."""
        return bool(self._requests) or len(self._loading) > 0

    @property
    def is_copying(self) -> bool:
        """Whether blocks are on their way between device and host."""
        return self.kv.offloading is not None and self.kv.offloading.copying

    def current_stats(self) -> CoreStats:
        """Gauges now, counters since start (a copy)."""
        pool, offloading = self.kv.pool, self.kv.offloading
        self.stats.num_running = len(self._slots.running)
        self.stats.num_waiting = self._waiting.num_all + len(self._followers) + self._loading.num_live
        self.stats.draft_blocks = 0 if self._draft_blocks is None else self._draft_blocks.num_held
        self.stats.kv_blocks_used = self._admission.num_used() + self.stats.draft_blocks
        self.stats.kv_cache_usage = self.stats.kv_blocks_used / pool.num_blocks
        self.stats.token_intervals = self._slots.intervals.counted
        if offloading is not None:
            self.stats.host_blocks_total = offloading.tier.num_slots
            self.stats.host_blocks_used = offloading.tier.num_used
            self.stats.host_evictions = offloading.tier.num_evicted
        return CoreStats(*(getattr(self.stats, name) for name in CoreStats.__struct_fields__))

    def live_requests(self) -> Iterator[tuple[Request, int, np.ndarray]]:
        """Requests that have not ended, with their scheduled rows (0 outside a slot) and known tokens: those
        in slots in their order, then the others by arrival."""
        running = map(self._slots.at, self._slots.running.tolist())
        others = (request for request in self._requests.values() if request.slot < 0)
        for request in itertools.chain(running, others):
            computed = int(self._slots.num_computed[request.slot]) if request.slot >= 0 else 0
            yield request, computed, self._slots.known(request)

    # ---- scheduling -----------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Decide the next step, or None when no request has rows to compute.

        Requests that need one row come first and always get it; prompts share what is left of the
        budget (`share`), then waiting requests are admitted, then prompts get what nobody took.
        """
        self._paused = False
        if self.kv.offloading is not None:
            self._settle()
        self._trials.advance()
        for request in self._followers.ready() if len(self._followers) else ():
            self._waiting.push(request)
        run = self._slots.running
        tokens = self._slots.num_tokens[run]
        need = tokens - self._slots.num_computed[run]
        need[tokens >= self._slots.max_total[run]] = 0  # the last token is being sampled
        need[self._slots.held[run]] = 0
        # Steps that judge drafts of the host follow one another.
        alone = self.drafting is not None and self.drafting.alone
        most_short = self._micro.choose(run, need, self._maker.next_id, divide=not alone)
        others = len(self._waiting) or len(self._loading)
        budget = self.limits.max_num_batched_tokens
        if not others and 0 < len(run) <= min(budget, most_short) and (need == 1).all():
            return self._decode(run)
        short = np.flatnonzero(need == 1)
        long = np.flatnonzero(need > 1)
        room = min(budget - 1 if (len(long) or others) and budget > 1 else budget, most_short)
        if len(short) > room:  # more than fit: those served longest ago
            short = short[np.argsort(self._slots.last_turn[run[short]], kind="stable")[:room]]
            self._slots.take_turns(run[short])
        rows = np.zeros(len(run), np.int32)
        rows[short] = 1
        budget -= len(short)
        if self.drafting is not None:
            self.drafting.propose(run, rows, budget // 2)
            drop_drafts(self._slots, self.kv, run, rows)
            budget -= int(rows.sum()) - len(short)
        most = self.limits.most_rows
        waiting = bool(others and self._slots.num_free)
        budget -= share(rows, need, long, budget, most, waiting, self._maker.next_id % 2)

        updates: list[TableChanges] = [[] for _ in self.kv.groups]
        preempted = self._make_room(run, rows, updates)
        if preempted:
            kept = np.isin(run, self._slots.running)
            budget = self.limits.max_num_batched_tokens - int(rows[kept].sum())
            run, rows, need, long = run[kept], rows[kept], need[kept], np.flatnonzero(need[kept] > 1)
        self._slots.register(
            run, self._slots.num_computed[run] + rows, self._maker.next_id
        )  # those admitted now may share them
        admitted = [] if preempted else self._admission.admit_loaded(budget, self._maker.next_id)
        budget -= sum(count for _, count in admitted)
        if not preempted and not self._paused:
            more = self._admission.admit(budget, self._maker.next_id)
            budget -= sum(count for _, count in more)
            admitted += more
        idle = not admitted and not rows.any()
        if give(rows, need, long, budget, most) and self.kv.has_windows:
            if self._make_room(run, rows, updates, may_preempt=idle):
                kept = np.isin(run, self._slots.running)
                run, rows = run[kept], rows[kept]
        return self._plan(run, rows, admitted, updates)

    def _decode(self, run: np.ndarray) -> ScheduledStep | None:
        """The common step, of which little changes: every request needs one row, nobody waits."""
        rows = np.ones(len(run), np.int32)
        if self.drafting is not None:
            self.drafting.propose(run, rows, self.limits.max_num_batched_tokens - len(run))
            drop_drafts(self._slots, self.kv, run, rows)
        updates: list[TableChanges] = [[] for _ in self.kv.groups]
        if self._make_room(run, rows, updates):
            kept = np.isin(run, self._slots.running)
            run, rows = run[kept], rows[kept]
        return self._plan(run, rows, [], updates)

    def _make_room(
        self, run: np.ndarray, rows: np.ndarray, updates: list[TableChanges], may_preempt: bool = True
    ) -> bool:
        """Give every scheduled row its blocks; returns whether requests were preempted for that.

        Blocks that windows have passed are freed first. Where blocks are short, drafts give theirs back; then
        a prompt gets fewer rows (`rows` is changed); where there are none, those are taken in which drafts
        were that did not stand, then requests leave from the end of the order. A request gets no rows if
        copies under way hold as many blocks as it needs.
        """
        if self.kv.has_windows:
            free_passed(self._slots, self.kv, run)
        short_of = self._slots.num_computed[run] + rows > self._slots.capacity[run]
        preempted, soon = False, -1
        if not short_of.any():
            return preempted
        if may_preempt and (lacking := lacking_blocks(self._slots, self.kv, run, rows)):
            self._give_back_drafts(lacking)
        if grow_by_one(self._slots, self.kv, run[short_of], rows[short_of], updates):
            return preempted
        for i in np.flatnonzero(short_of):
            slot = int(run[i])
            while self._slots.requests[slot] is not None:
                start = int(self._slots.num_computed[slot])
                room = extend(self._slots, self.kv, slot, start + int(rows[i]), updates) - start
                if room > 0 or not may_preempt:
                    rows[i] = room
                    break
                if give_back_spare(self._slots, self.kv, run, rows):
                    continue
                if self.kv.offloading is not None:
                    soon = self.kv.offloading.num_held() if soon < 0 else soon
                    if soon < len(updates) and (freed := self._give_up_loading()) is not None:
                        soon += freed
                        continue
                    if soon >= len(updates):
                        soon -= len(updates)
                        rows[i] = 0
                        self._paused = True
                        break
                self._preempt(self._slots.at(int(self._slots.running[-1])))  # may be the one that needs it
                preempted = True
        if preempted:
            keep_running(self._slots, updates)
        return preempted

    def _give_back_drafts(self, count: int, may_draft: bool = False) -> int:
        """See `Drafting.give_back`."""
        freed = 0 if self.drafting is None else self.drafting.give_back(count, may_draft)
        self.stats.draft_blocks_given_back += freed
        return freed

    # ---- copies ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take back requests whose copies are through and that can't go on with what they brought."""
        offloading = self.kv.offloading
        assert offloading is not None
        offloading.poll(self.stats)
        for request in self._loading.ended():
            self._loading.remove(request)
            waiter = request.seq.waiter
            self.stats.host_loads_failed += waiter.failed
            self.stats.disk_cache_hits += waiter.num_read * self.kv.block_size // len(self.kv.groups)
            waiter.num_read = 0
            if request.num_found or request.done:
                self.kv.free(request.seq)
            if request.done:
                self.kv.end(request.seq)
            else:
                self._waiting.push(request)

    def _give_up_loading(self) -> int | None:
        """Make the newest loading request give way if it is newer than all that run.

        Returns:
            Blocks that are free once its copies are through (now, if they are), or None: there is no such
            request.
        """
        live = [request for request in self._loading.live() if request.num_found]
        if not live or live[-1].order < self._slots.orders[-1]:
            return None
        request = live[-1]
        self._loading.give_up(request)
        self._count_preemption(request)
        self._admission.outlook.forecast.preempted()
        blocks = self.kv.num_own(request.seq)
        if not request.seq.waiter:
            self._settle()
            return 0
        return blocks

    def poll(self) -> ScheduledStep | None:
        """A step that has nothing to compute and asks for news of copies, or None if none are under way."""
        if not self.is_copying:
            return None
        nobody, nothing = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return self._maker.make(nobody, nothing, [], [[] for _ in self.kv.groups])

    def _plan(
        self,
        run: np.ndarray,
        rows: np.ndarray,
        admitted: list[tuple[Admission, int]],
        updates: list[TableChanges],
    ) -> ScheduledStep | None:
        if admitted or not rows.all():
            chosen = np.flatnonzero(rows)
            slots = np.concatenate([run[chosen], [a.slot for a, _ in admitted]]).astype(np.int64)
            counts = np.concatenate([rows[chosen], [count for _, count in admitted]]).astype(np.int32)
        else:
            slots, counts = run, rows
        copies = []
        if self.kv.offloading is not None:
            copies = self.kv.offloading.plan(self._maker.next_id, clean=len(slots) > 0 and not self._paused)
        if not len(slots) and not copies:
            return None
        if (counts[:-1] > counts[1:]).any():  # one-row requests first: attention treats them apart
            first = np.argsort(counts > 1, kind="stable")
            slots, counts = slots[first], counts[first]
        return self._maker.make(slots, counts, [admission for admission, _ in admitted], updates, copies)

    def release_held(self) -> bool:
        """Let requests go on whose masks have been made; whether some still wait for theirs."""
        return self._maker.release_held()

    # ---- results --------------------------------------------------------------------------------

    def update(self, step: ScheduledStep, result: StepResult) -> list[CoreOutput]:
        """Take in a step's tokens: append, end what is finished, free, register full blocks."""
        plan = step.plan
        if (offloading := self.kv.offloading) is not None:
            offloading.step_ended(plan.step_id, result.copies_done, result.copies_failed, self.stats)
        if self.drafting is not None:
            self._digest_drafts(self.drafting, plan, self._slots.epoch[plan.slots] == step.epochs, result)
        outputs = take_in(self._slots, plan, step.epochs, result, self.stats, self._finish)
        if self.kv.hasher is not None:
            left = plan.slots[self._slots.epoch[plan.slots] == step.epochs]
            # Rows of a step that is in flight yet may be among those computed.
            self._slots.register(left, self._slots.num_computed[left], self._maker.next_id - 1)
        self.kv.complete(plan.step_id)
        self._trials.passed(plan, step.epochs)
        return outputs

    def _digest_drafts(
        self, drafting: Drafting, plan: StepPlan, live: np.ndarray, result: StepResult
    ) -> None:
        """Take back the drafts that did not stand, and learn what there is to learn."""
        going = live & (result.num_tokens > 0)
        self._admission.outlook.pace.passed(plan.slots[going], result.num_tokens[going])
        if plan.num_drafts is not None:
            drafted = live & (plan.num_drafts > 0)
            self._slots.take_back(plan.slots[drafted], plan.num_drafts[drafted], result.num_tokens[drafted])
            drafting.judged(plan, live, result, self.stats)
        if result.drafted is not None:
            drafting.drafted(plan, live, result)

    def fail(self, steps: list[ScheduledStep], message: str) -> list[CoreOutput]:
        """The first of these steps could not be computed, so that the later ones are void.

        Takes back the keys that they registered. Their requests are tried apart; one that fails alone ends.
        """
        self.kv.roll_back(min(step.plan.step_id for step in steps))
        culprit = self._trials.fail(steps[0].plan, steps[0].epochs)
        self._admission.look_again()
        return [] if culprit is None else [self._finish(culprit, "error", error=message)]

    # ---- moving requests ------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and queue it again; its KV will be recomputed, or copied back.

        A token still in flight is dropped: nobody has seen it, and sampling it again at the same
        position gives the same choice.
        """
        self._put_back(request)
        self._admission.outlook.forecast.preempted()

    def _put_back(self, request: Request) -> None:
        """Take a request out of its slot, free its blocks and queue it again."""
        self._slots.leave(request)
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()  # recomputed with the prompt
        self._count_preemption(request)
        self._waiting.push(request)

    def _count_preemption(self, request: Request) -> None:
        request.metrics.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _finish(
        self,
        request: Request,
        reason: str,
        stop_reason: int | None = None,
        error: str | None = None,
        error_param: str | None = None,
        complete: bool = False,
    ) -> CoreOutput:
        request.done = True
        if request.slot >= 0:
            self._slots.leave(request)
        elif request.loading:
            self._loading.give_up(request)
        elif not self._followers.drop(request):
            self._waiting.ended(request)
        if request.loading:
            self._settle()  # what it holds is free now, unless copies are under way
        else:
            self.kv.end(request.seq)
        used = len(request.token_ids) - request.prompt_len
        if used > 0:
            limit = request.max_total - request.prompt_len
            self._admission.outlook.forecast.ended(used, limit, request.ends_at_limit)
        del self._requests[request.core.request_id]
        now = time.time()
        request.metrics.last_token_time = request.metrics.finished_time = now
        output = self._slots.news.report(request, self._slots.known(request))
        output.finish_reason, output.stop_reason = reason, stop_reason
        output.error, output.error_param, output.complete = error, error_param, complete
        output.metrics = request.metrics
        return output

    # ---- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the invariants of scheduler and pool (for tests).

        Raises:
            AssertionError: naming the first violation.
        """
        self._slots.check()
        waiting = self._waiting.live()
        counted = self._waiting.num_all
        assert len(waiting) == counted, f"{len(waiting)} requests wait, {counted} counted"
        loading = [request for request in self._loading if not request.done]
        outside = len(waiting) + len(self._followers) + len(loading)
        told = "a request is neither waiting nor loading nor running"
        assert outside + len(self._slots.running) == len(self._requests), told
        assert self._loading.num_live == len(self._loading.live()), "loading requests are miscounted"
        assert self._slots.num_free >= self._loading.num_live, "a loading request has no slot to go to"
        assert not any(table for r in waiting for table in r.seq.tables), "a waiting request holds blocks"
        running = self._slots.running.tolist()
        holders = [(self._slots.at(s).seq, int(self._slots.num_computed[s])) for s in running]
        drafts = [] if self._draft_blocks is None else self._draft_blocks.held()
        assert not any(pages for slot, pages in enumerate(drafts) if slot not in running), (
            "drafts of nobody hold blocks"
        )
        self.kv.check(holders + [(request.seq, request.num_found) for request in self._loading], drafts)
