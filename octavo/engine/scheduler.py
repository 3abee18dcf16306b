"""The scheduler: one rule decides which tokens are computed next.

A request has `num_tokens` (known, or being sampled by a step in flight) and `num_computed`. A step
gives requests some of the difference, under a budget. A prompt's chunk, the next token of a
running request and a recompute after preemption are the same thing: rows of one ragged batch.

State is arrays indexed by slot; a step touches only what changes. The scheduler runs ahead of the
device: `schedule` may be called again before `update` brought the last step's tokens, which count
as known from the moment their sampling is scheduled.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from octavo.engine.forecast import Forecast
from octavo.engine.loading import LoadingRequests
from octavo.engine.news import News
from octavo.engine.request import Request, extras_of
from octavo.kv.manager import NEVER, KVManager, Prefix
from octavo.kv.shared_prefix import SharedPrefix
from octavo.messages import (
    Admission,
    BlockCopies,
    BlockUpdate,
    CoreOutput,
    CoreRequest,
    CoreStats,
    StepPlan,
    StepResult,
)

_NO_UPDATE = BlockUpdate(*np.zeros((3, 0), np.int32))
_TableChanges = list[tuple[int, int, int]]  # of one KV group: slot, column, block


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one step and of the running set (see the settings of the same names)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    long_prefill_token_threshold: int = 0
    use_priority: bool = False
    find_shared_prefix: bool = True
    look_ahead: bool = True


@dataclass
class ScheduledStep:
    """A plan and what `update` needs to recognise requests that left their slot meanwhile."""

    plan: StepPlan
    epochs: np.ndarray


class Scheduler:
    """Owns the waiting queue, the slots and their state; decides steps and digests their results.

    Invariants (see `check`): a request is waiting, or loading, or in exactly one slot, or done; a slot's rows
    scheduled never exceed its known tokens; tables hold every scheduled token; a token that was
    reported never changes.
    """

    def __init__(self, limits: SchedulerLimits, kv: KVManager):
        self.limits = limits
        self.kv = kv
        slots = limits.max_num_seqs
        self._num_tokens = np.zeros(slots, np.int32)  # known or being sampled
        self._num_known = np.zeros(slots, np.int32)
        self._num_computed = np.zeros(slots, np.int32)  # scheduled
        self._num_registered = np.zeros(slots, np.int32)  # blocks offered to the prefix cache
        self._capacity = np.zeros(slots, np.int32)  # tokens that all block tables hold
        self._passing = np.full(slots, NEVER, np.int32)  # computed tokens that let a window free blocks
        self._prompt_len = np.zeros(slots, np.int32)
        self._max_total = np.zeros(slots, np.int32)
        self._last_turn = np.zeros(
            slots, np.int64
        )  # when the request was served last, of those that take turns
        self._epoch = np.zeros(slots, np.int64)  # grows when a slot changes hands
        self._wants_prompt_logprobs = np.zeros(slots, bool)
        self._tokens = np.zeros((slots, limits.max_model_len), np.int32)
        self._stop_uses = np.zeros(limits.vocab_size, np.int32)  # requests in slots that a token ends
        self._by_slot: list[Request | None] = [None] * slots
        self._free_slots = list(range(slots - 1, -1, -1))
        self._shared = SharedPrefix(slots, kv.full_groups)
        self._news = News(slots)
        self._loading = LoadingRequests()
        self._forecast = Forecast(kv.groups)
        self._certain = np.zeros(slots, bool)  # nothing ends the request before its limit
        self._running = np.zeros(0, np.int64)  # slots, in the requests' order
        self._orders: list[tuple[int, int]] = []  # of the requests in `_running`
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._step = 0
        self._turns = 0
        self._num_waiting = 0
        self._paused = False  # a request waits for blocks that copies under way hold
        self.stats = CoreStats(kv_blocks_total=kv.pool.num_blocks)
        # New requests leave a little room, so that running ones need not be preempted at once.
        self._watermark = max(1, kv.pool.num_blocks // 100)

    # ---- requests come and go -------------------------------------------------------------------

    def add(self, core: CoreRequest) -> None:
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
        )
        request.metrics.arrival_time = core.arrival_time
        self._requests[core.request_id] = request
        self._enqueue(request)

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
        """Whether any request is waiting or running."""
        return bool(self._requests)

    @property
    def is_copying(self) -> bool:
        """Whether blocks are on their way between device and host."""
        return self.kv.offloading is not None and self.kv.offloading.copying

    def current_stats(self) -> CoreStats:
        """Gauges now, counters since start (a copy)."""
        pool, offloading = self.kv.pool, self.kv.offloading
        self.stats.num_running = len(self._running)
        self.stats.num_waiting = self._num_waiting + self._loading.num_live
        self.stats.kv_blocks_used = self._num_used()
        self.stats.kv_cache_usage = self.stats.kv_blocks_used / pool.num_blocks
        if offloading is not None:
            self.stats.host_blocks_total = offloading.tier.num_slots
            self.stats.host_blocks_used = offloading.tier.num_used
            self.stats.host_evictions = offloading.tier.num_evicted
        return CoreStats(*(getattr(self.stats, name) for name in CoreStats.__struct_fields__))

    # ---- scheduling -----------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Decide the next step, or None when no request has rows to compute.

        Requests that need one row come first and always get it; prompts share what is left of the
        budget (`_share`), then waiting requests are admitted, then prompts get what nobody took.
        """
        self._paused = False
        if self.kv.offloading is not None:
            self._settle()
        run = self._running
        tokens = self._num_tokens[run]
        need = tokens - self._num_computed[run]
        need[tokens >= self._max_total[run]] = 0  # the last token is being sampled
        others = self._num_waiting or len(self._loading)
        if not others and 0 < len(run) <= self.limits.max_num_batched_tokens and (need == 1).all():
            return self._decode(run)
        budget = self.limits.max_num_batched_tokens
        short = np.flatnonzero(need == 1)
        long = np.flatnonzero(need > 1)
        room = budget - 1 if (len(long) or others) and budget > 1 else budget
        if len(short) > room:  # more than fit: those served longest ago
            short = short[np.argsort(self._last_turn[run[short]], kind="stable")[:room]]
            self._last_turn[run[short]] = self._turns + np.arange(room)
            self._turns += room
        rows = np.zeros(len(run), np.int32)
        rows[short] = 1
        budget -= len(short)
        budget -= self._share(rows, need, long, budget)

        updates: list[_TableChanges] = [[] for _ in self.kv.groups]
        preempted = self._make_room(run, rows, updates)
        if preempted:
            kept = np.isin(run, self._running)
            budget = self.limits.max_num_batched_tokens - int(rows[kept].sum())
            run, rows, need, long = run[kept], rows[kept], need[kept], np.flatnonzero(need[kept] > 1)
        self._register(run, self._num_computed[run] + rows, self._step)  # those admitted now may share them
        admitted = [] if preempted else self._admit_loaded(budget)
        budget -= sum(count for _, count in admitted)
        if not preempted and not self._paused:
            more = self._admit(budget)
            budget -= sum(count for _, count in more)
            admitted += more
        idle = not admitted and not rows.any()
        if self._give(rows, need, long, budget) and self.kv.has_windows:
            if self._make_room(run, rows, updates, may_preempt=idle):
                kept = np.isin(run, self._running)
                run, rows = run[kept], rows[kept]
        return self._plan(run, rows, admitted, updates)

    def _decode(self, run: np.ndarray) -> ScheduledStep | None:
        """The common step, of which little changes: every request needs one row, nobody waits."""
        rows = np.ones(len(run), np.int32)
        updates: list[_TableChanges] = [[] for _ in self.kv.groups]
        if self._make_room(run, rows, updates):
            kept = np.isin(run, self._running)
            run, rows = run[kept], rows[kept]
        return self._plan(run, rows, [], updates)

    def _share(self, rows: np.ndarray, need: np.ndarray, long: np.ndarray, budget: int) -> int:
        """Divide the budget among prompts under way and those behind them; returns what was given.

        The first in order gets half when another one wants rows, the others (nearest to their end
        first) a half of the rest when requests wait. So no prompt, however long, holds back a short
        one behind it, and none is held back for ever. Odd tokens fall to either side in turn.
        """
        odd = self._step % 2
        waiting = bool((self._num_waiting or len(self._loading)) and self._free_slots)
        half = (budget + odd) // 2
        given = self._give(rows, need, long[:1], half if waiting or len(long) > 1 else budget)
        others = long[1:][np.argsort(need[long[1:]], kind="stable")]
        rest = budget - given
        return given + self._give(rows, need, others, (rest + odd) // 2 if waiting else rest)

    def _give(self, rows: np.ndarray, need: np.ndarray, long: np.ndarray, budget: int) -> int:
        """Add rows to the prompts at indexes `long`, in order; returns how many were given."""
        given, most = 0, self.limits.long_prefill_token_threshold or self.limits.max_model_len
        for i in long:
            if given >= budget:
                break
            count = min(int(need[i]) - int(rows[i]), budget - given, most - int(rows[i]))
            rows[i] += count
            given += count
        return given

    def _make_room(
        self, run: np.ndarray, rows: np.ndarray, updates: list[_TableChanges], may_preempt: bool = True
    ) -> bool:
        """Give every scheduled row its blocks; returns whether requests were preempted for that.

        Blocks that windows have passed are freed first. Where blocks are short, a prompt gets fewer rows
        (`rows` is changed); where there are none, requests leave from the end of the order. A request gets
        no rows if copies under way hold as many blocks as it needs.
        """
        if self.kv.has_windows:
            self._free_passed(run)
        short_of = self._num_computed[run] + rows > self._capacity[run]
        preempted, soon = False, -1
        if not short_of.any():
            return preempted
        if self._grow_by_one(run[short_of], rows[short_of], updates):
            return preempted
        for i in np.flatnonzero(short_of):
            slot = int(run[i])
            while self._by_slot[slot] is not None:
                start = int(self._num_computed[slot])
                room = self._extend(slot, start + int(rows[i]), updates) - start
                if room > 0 or not may_preempt:
                    rows[i] = room
                    break
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
                self._preempt(self._at(int(self._running[-1])))  # may be the one that needs it
                preempted = True
        if preempted:
            for group, changes in enumerate(updates):
                updates[group] = [change for change in changes if self._by_slot[change[0]] is not None]
        return preempted

    def _grow_by_one(self, slots: np.ndarray, rows: np.ndarray, updates: list[_TableChanges]) -> bool:
        """Give each of these requests one more block, if all of them need just that and have one table."""
        if len(updates) > 1 or (rows > 1).any() or len(slots) > self.kv.pool.num_free:
            return False
        tables = [self._at(slot).seq.tables[0] for slot in slots.tolist()]
        blocks = self.kv.pool.allocate(len(tables))
        for slot, table, block in zip(slots.tolist(), tables, blocks, strict=True):
            updates[0].append((slot, len(table), block))
            table.append(block)
        self._capacity[slots] += self.kv.block_size
        return True

    def _free_passed(self, run: np.ndarray) -> None:
        """Free the blocks that the windows of running requests have passed."""
        for i in np.flatnonzero(self._num_computed[run] >= self._passing[run]):
            slot = int(run[i])
            self._passing[slot] = self.kv.free_passed(self._at(slot).seq, int(self._num_computed[slot]))

    def _extend(self, slot: int, end: int, updates: list[_TableChanges]) -> int:
        """Extend a request's tables to hold `end` tokens, or as many as there are blocks for."""
        seq = self._at(slot).seq
        new = self.kv.grow(seq, end)
        if new is None:
            end = self.kv.fit(seq, end)
            new = self.kv.grow(seq, end)
            assert new is not None
        for changes, table, blocks in zip(updates, seq.tables, new, strict=True):
            first = len(table) - len(blocks)
            changes += [(slot, first + j, block) for j, block in enumerate(blocks)]
        self._capacity[slot] = self.kv.capacity(seq)
        return end

    def _admit(self, budget: int) -> list[tuple[Admission, int]]:
        """Move waiting requests into slots, in order, while slots, blocks and budget last."""
        admitted: list[tuple[Admission, int]] = []
        most = self.limits.long_prefill_token_threshold or self.limits.max_model_len
        size = self.kv.block_size
        while budget > 0 and len(self._free_slots) > self._loading.num_live and self._num_waiting:
            request = self._peek_waiting()
            known = len(request.token_ids)
            alone = not (len(self._running) or self._loading.num_live)
            if request.wants_prompt_logprobs:
                prefix = self.kv.no_prefix()
            elif self.kv.fetch(request.seq, request.token_ids):
                self._begin_loading(request, 0, 0)
                continue
            else:
                prefix = self.kv.find_prefix(request.seq, request.token_ids, busy=not alone)
            cached = prefix.num_blocks * size
            count = min(known - cached, budget, most)
            spare = 0 if alone else self._watermark
            free = self.kv.num_free_after(prefix) - spare
            while count and self.kv.missing_at_most(prefix, known, count) > free:
                count //= 2  # windows need less room in smaller steps
            if not count or not (alone or self._foresees_room(request, prefix, count)):
                break
            self.kv.adopt(request.seq, prefix)
            self.kv.grow(request.seq, cached + count, known)
            if request.seq.waiter:
                self._begin_loading(request, cached, prefix.on_device * size)
                continue
            self._pop_waiting()
            admitted.append(self._take_in(request, cached, cached, count))
            budget -= count
        return admitted

    def _admit_loaded(self, budget: int) -> list[tuple[Admission, int]]:
        """Move requests into slots whose blocks have been copied; they hold all that they need for that."""
        admitted: list[tuple[Admission, int]] = []
        most = self.limits.long_prefill_token_threshold or self.limits.max_model_len
        for request in self._loading.ready() if len(self._loading) else ():
            found = request.num_found
            count = min(len(request.token_ids) - found, budget, most)
            if count <= 0:
                break
            end = self.kv.fit(request.seq, found + count)  # windows may get less, but what they began with
            self.kv.grow(request.seq, end)
            count = end - found
            self._loading.remove(request)
            admitted.append(self._take_in(request, found, request.num_on_device, count))
            budget -= count
        return admitted

    def _take_in(self, request: Request, cached: int, on_device: int, count: int) -> tuple[Admission, int]:
        """Enter a request into a slot and give it its first `count` rows, behind `cached` tokens."""
        stats = self.stats
        copied = cached - on_device
        if request.num_cached >= 0:  # back after preemption, which is no hit
            stats.resumed_by_copy += copied > 0
            stats.resumed_by_compute += copied == 0
        else:
            request.num_cached = cached
            request.metrics.scheduled_time = time.time()
            if not request.wants_prompt_logprobs and self.kv.shares:
                known = len(request.token_ids)
                stats.prefix_cache_queries += known
                stats.prefix_cache_hits += on_device
                if self.kv.offloading is not None:
                    stats.host_cache_queries += known - on_device
                    stats.host_cache_hits += copied
        admission = self._enter_slot(request, cached)
        self._register(np.array([admission.slot]), np.array([cached + count]), self._step)
        return admission, count

    def _foresees_room(self, request: Request, prefix: Prefix, count: int) -> bool:
        """Whether the blocks of all running requests and this one will fit until they end, as expected."""
        if not self.limits.look_ahead:
            return True
        run = self._running
        new = [*self._loading.live(), request]
        prompts = np.concatenate([self._prompt_len[run], [r.prompt_len for r in new]])
        tokens = np.concatenate([self._num_tokens[run], [len(r.token_ids) for r in new]])
        limits = np.concatenate([self._max_total[run], [r.max_total for r in new]]) - prompts
        certain = np.concatenate([self._certain[run], [r.ends_at_limit for r in new]])
        remaining = self._forecast.remaining(tokens - prompts, limits, certain)
        pool = self.kv.pool
        taken = pool.num_free - self.kv.num_free_after(prefix)
        taken += self.kv.missing_at_most(prefix, len(request.token_ids), count)
        return self._forecast.peak(self._num_used() + taken, tokens, remaining) <= pool.num_blocks

    def _num_used(self) -> int:
        """Blocks that requests hold."""
        offloading = self.kv.offloading
        return self.kv.pool.num_used - (0 if offloading is None else offloading.num_held())

    # ---- copies ---------------------------------------------------------------------------------

    def _begin_loading(self, request: Request, found: int, on_device: int) -> None:
        """The first waiting request waits for copies from here on (`found` 0: for reads from disk)."""
        self._pop_waiting()
        request.num_found, request.num_on_device = found, on_device
        self._loading.add(request)

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
                self._enqueue(request)

    def _give_up_loading(self) -> int | None:
        """Make the newest loading request give way if it is newer than all that run.

        Returns:
            Blocks that are free once its copies are through (now, if they are), or None: there is no such
            request.
        """
        live = [request for request in self._loading.live() if request.num_found]
        if not live or live[-1].order < self._orders[-1]:
            return None
        request = live[-1]
        self._loading.give_up(request)
        self._count_preemption(request)
        blocks = self.kv.num_own(request.seq)
        if not request.seq.waiter:
            self._settle()
            return 0
        return blocks

    def poll(self) -> ScheduledStep | None:
        """A step that has nothing to compute and asks for news of copies, or None if none are under way."""
        if not self.is_copying:
            return None
        return self._make_step(np.zeros(0, np.int64), np.zeros(0, np.int32), [], [[] for _ in self.kv.groups])

    def _plan(
        self,
        run: np.ndarray,
        rows: np.ndarray,
        admitted: list[tuple[Admission, int]],
        updates: list[_TableChanges],
    ) -> ScheduledStep | None:
        if admitted or not rows.all():
            chosen = np.flatnonzero(rows)
            slots = np.concatenate([run[chosen], [a.slot for a, _ in admitted]]).astype(np.int64)
            counts = np.concatenate([rows[chosen], [count for _, count in admitted]]).astype(np.int32)
        else:
            slots, counts = run, rows
        copies = []
        if self.kv.offloading is not None:
            copies = self.kv.offloading.plan(self._step, clean=len(slots) > 0 and not self._paused)
        if not len(slots) and not copies:
            return None
        if (counts[:-1] > counts[1:]).any():  # one-row requests first: attention treats them apart
            first = np.argsort(counts > 1, kind="stable")
            slots, counts = slots[first], counts[first]
        return self._make_step(slots, counts, [admission for admission, _ in admitted], updates, copies)

    def _make_step(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        admissions: list[Admission],
        updates: list[_TableChanges],
        copies: Iterable[BlockCopies] = (),
    ) -> ScheduledStep:
        start = self._num_computed[slots]
        self._num_computed[slots] += counts
        samples = self._num_computed[slots] == self._num_tokens[slots]
        self._num_tokens[slots] += samples
        plan = StepPlan(
            step_id=self._step,
            admissions=admissions,
            block_updates=[BlockUpdate(*np.array(c, np.int32).T) if c else _NO_UPDATE for c in updates],
            slots=slots.astype(np.int32),
            num_rows=counts,
            start=start,
            samples=samples,
            prompt_logprobs=self._prompt_logprobs(slots),
            shared_blocks=self._shared_blocks(slots, counts, start),
            copies=list(copies),
        )
        self._register(slots, self._num_computed[slots], self._step)
        self._step += 1
        self.stats.num_steps += len(slots) > 0
        return ScheduledStep(plan, self._epoch[slots])

    def _shared_blocks(self, slots: np.ndarray, counts: np.ndarray, start: np.ndarray) -> int:
        """See `StepPlan.shared_blocks`."""
        if not self.limits.find_shared_prefix or len(slots) < 2 or counts.max() > 1:
            return 0
        shared = self._shared.count(slots, lambda slot: self._at(slot).seq.tables)
        # A block that is filled in this step may be shared already, but has to be written first.
        return min(shared, int(start.min()) // self.kv.block_size) if shared else 0

    def _prompt_logprobs(self, slots: np.ndarray) -> np.ndarray | None:
        if not self._wants_prompt_logprobs[slots].any():
            return None
        wanted = np.full(len(slots), -1, np.int32)
        for i in np.flatnonzero(self._wants_prompt_logprobs[slots]):
            request = self._by_slot[int(slots[i])]
            assert request is not None and request.core.params.prompt_logprobs is not None
            top = request.core.params.prompt_logprobs
            wanted[i] = self.limits.vocab_size if top == -1 else top
        return wanted

    # ---- results --------------------------------------------------------------------------------

    def update(self, step: ScheduledStep, result: StepResult) -> list[CoreOutput]:
        """Take in a step's tokens: append, end what is finished, free, register full blocks."""
        plan = step.plan
        self._end_copies(result)
        now = time.time()
        live = self._epoch[plan.slots] == step.epochs
        if result.prompt_logprobs is not None:
            self._collect_prompt_logprobs(plan, live, result)
        outputs: list[CoreOutput] = []
        sampled = live & plan.samples
        for column in range(result.tokens.shape[1]):
            if column:
                sampled &= self._epoch[plan.slots] == step.epochs  # not ended by an earlier column
            rows = np.flatnonzero(sampled & (result.num_tokens > column))
            outputs += self._append(plan.slots[rows], result.tokens[rows, column], rows, column, result, now)
        if self.kv.hasher is not None:
            left = plan.slots[self._epoch[plan.slots] == step.epochs]
            self._register(left, self._num_computed[left], plan.step_id)
        self.kv.complete(plan.step_id)
        return outputs

    def _end_copies(self, result: StepResult) -> None:
        offloading = self.kv.offloading
        if offloading is not None:
            for numbers, ok in ((result.copies_done, True), (result.copies_failed, False)):
                for number in numbers:
                    offloading.ended(number, ok, self.stats)

    def _append(
        self,
        slots: np.ndarray,
        tokens: np.ndarray,
        rows: np.ndarray,
        column: int,
        result: StepResult,
        now: float,
    ) -> list[CoreOutput]:
        known = self._num_known[slots]
        self._tokens[slots, known] = tokens
        self._num_known[slots] = known + 1
        self.stats.generation_tokens += len(slots)
        if result.logprobs is not None:
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                entries = result.logprobs[row]
                if entries is not None:
                    self._at(slot).logprobs.append(entries[column])
        if result.pooled is not None:
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                self._at(slot).pooled = result.pooled[row]
        first = known == self._prompt_len[slots]
        for slot in slots[first].tolist() if first.any() else ():
            self._at(slot).metrics.first_token_time = now
            self.stats.prompt_tokens += int(self._prompt_len[slot])
        may_end = (known + 1 >= self._max_total[slots]) | (self._stop_uses[tokens] > 0)
        outputs, news = self._news.tell(slots, tokens, may_end)
        for slot, token, ending in zip(
            slots[news].tolist(), tokens[news].tolist(), may_end[news].tolist(), strict=True
        ):
            request = self._at(slot)
            if ending and (ended := self._ended(request, slot, token)) is not None:
                outputs.append(ended)
            elif request.core.stream:
                outputs.append(self._report(request))
        return outputs

    def _ended(self, request: Request, slot: int, token: int) -> CoreOutput | None:
        """The last output of a request that its newest token ends, else None."""
        known = int(self._num_known[slot])
        if token in request.stop_ids and known - request.prompt_len >= request.core.params.min_tokens:
            return self._finish(request, "stop", None if token in request.core.eos_token_ids else token)
        if known >= self._max_total[slot]:
            return self._finish(request, "length")
        return None

    def fail(self, steps: list[ScheduledStep], message: str) -> list[CoreOutput]:
        """Steps could not be computed: end their requests, take back the keys they registered."""
        self.kv.roll_back(min(step.plan.step_id for step in steps))
        outputs = []
        for step in steps:
            live = self._epoch[step.plan.slots] == step.epochs
            for slot in step.plan.slots[live].tolist():
                request = self._by_slot[slot]
                if request is not None:
                    outputs.append(self._finish(request, "error", error=message))
        return outputs

    def _collect_prompt_logprobs(self, plan: StepPlan, live: np.ndarray, result: StepResult) -> None:
        assert result.prompt_logprobs is not None
        for i, entries in enumerate(result.prompt_logprobs):
            if entries is not None and live[i]:
                request = self._at(int(plan.slots[i]))
                if not request.prompt_logprobs:
                    request.prompt_logprobs.append(None)  # nothing precedes the first token
                request.prompt_logprobs.extend(entries)
                self._wants_prompt_logprobs[request.slot] = request.wants_prompt_logprobs

    def _register(self, slots: np.ndarray, computed: np.ndarray, step: int) -> None:
        """Offer full blocks of known tokens to the cache, whose rows are scheduled up to `computed`."""
        if self.kv.hasher is None:
            return
        ready = np.minimum(computed, self._num_known[slots])
        full = ready // self.kv.block_size > self._num_registered[slots]
        if not full.any():
            return
        slots, ready = slots[full], ready[full]
        for slot, count in zip(slots.tolist(), ready.tolist(), strict=True):
            self.kv.register(self._at(slot).seq, self._tokens[slot], count, step)
        self._num_registered[slots] = ready // self.kv.block_size

    # ---- moving requests ------------------------------------------------------------------------

    def _at(self, slot: int) -> Request:
        request = self._by_slot[slot]
        assert request is not None
        return request

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.order, request))
        self._num_waiting += 1

    def _peek_waiting(self) -> Request:
        while self._waiting[0][1].done:  # aborted while it waited
            heapq.heappop(self._waiting)
        return self._waiting[0][1]

    def _pop_waiting(self) -> None:
        heapq.heappop(self._waiting)
        self._num_waiting -= 1

    def _enter_slot(self, request: Request, computed: int) -> Admission:
        slot = request.slot = self._free_slots.pop()
        tokens, core = request.token_ids, request.core
        self._by_slot[slot] = request
        self._tokens[slot, : len(tokens)] = tokens
        self._num_tokens[slot] = self._num_known[slot] = len(tokens)
        self._num_computed[slot] = computed
        self._num_registered[slot] = computed // self.kv.block_size
        self._capacity[slot] = self.kv.capacity(request.seq)
        self._passing[slot] = self.kv.free_passed(request.seq, computed)
        self._shared.enter(slot)
        self._prompt_len[slot] = request.prompt_len
        self._max_total[slot] = request.max_total
        self._certain[slot] = request.ends_at_limit
        self._last_turn[slot] = self._turns
        self._news.enter(request)
        self._wants_prompt_logprobs[slot] = request.wants_prompt_logprobs
        for token in request.stop_ids:
            self._stop_uses[token] += 1
        place = bisect.bisect(self._orders, request.order)
        self._orders.insert(place, request.order)
        self._running = np.insert(self._running, place, slot)
        return Admission(
            slot=slot,
            token_ids=tokens,
            prompt_len=request.prompt_len,
            num_computed=computed,
            block_ids=[list(table) for table in request.seq.tables],
            params=core.params,
            seed=core.seed,
            eos_token_ids=core.eos_token_ids,
            bad_words_ids=core.bad_words_ids,
        )

    def _leave_slot(self, request: Request) -> None:
        slot = request.slot
        request.token_ids = self._tokens[slot, : self._num_known[slot]].copy()
        self._news.leave(request)
        self._epoch[slot] += 1
        self._shared.leave(slot)
        self._by_slot[slot] = None
        self._free_slots.append(slot)
        for token in request.stop_ids:
            self._stop_uses[token] -= 1
        place = bisect.bisect_left(self._orders, request.order)
        del self._orders[place]
        self._running = np.delete(self._running, place)
        self.kv.free(request.seq)
        request.slot = -1

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and queue it again; its KV will be recomputed, or copied back.

        A token still in flight is dropped: nobody has seen it, and sampling it again at the same
        position gives the same choice.
        """
        self._leave_slot(request)
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()  # recomputed with the prompt
        self._count_preemption(request)
        self._enqueue(request)

    def _count_preemption(self, request: Request) -> None:
        request.metrics.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _finish(
        self, request: Request, reason: str, stop_reason: int | None = None, error: str | None = None
    ) -> CoreOutput:
        request.done = True
        if request.slot >= 0:
            self._leave_slot(request)
        elif request.loading:
            self._loading.give_up(request)
        else:
            self._num_waiting -= 1
        if request.loading:
            self._settle()  # what it holds is free now, unless copies are under way
        else:
            self.kv.end(request.seq)
        used = len(request.token_ids) - request.prompt_len
        if used > 0 and not request.ends_at_limit:
            self._forecast.observe(used, request.max_total - request.prompt_len)
        del self._requests[request.core.request_id]
        now = time.time()
        request.metrics.last_token_time = request.metrics.finished_time = now
        output = self._report(request)
        output.finish_reason, output.stop_reason, output.error = reason, stop_reason, error
        output.metrics = request.metrics
        return output

    def _report(self, request: Request) -> CoreOutput:
        slot = request.slot
        known = request.token_ids if slot < 0 else self._tokens[slot, : self._num_known[slot]]
        return self._news.report(request, known)

    # ---- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the invariants of scheduler and pool (for tests).

        Raises:
            AssertionError: naming the first violation.
        """
        running = {int(slot) for slot in self._running}
        assert len(running) == len(self._running), "a slot runs twice"
        assert running == {s for s, r in enumerate(self._by_slot) if r is not None}, (
            "slots and requests differ"
        )
        assert running.isdisjoint(self._free_slots), "a running slot is free"
        assert len(running) + len(self._free_slots) == self.limits.max_num_seqs, "a slot is lost"
        waiting = [r for _, r in self._waiting if not r.done]
        assert len(waiting) == self._num_waiting, f"{len(waiting)} requests wait, {self._num_waiting} counted"
        loading = [request for request in self._loading if not request.done]
        assert len(waiting) + len(running) + len(loading) == len(self._requests), (
            "a request is neither waiting nor loading nor running"
        )
        assert self._loading.num_live == len(self._loading.live()), "loading requests are miscounted"
        assert len(self._free_slots) >= self._loading.num_live, "a loading request has no slot to go to"
        for slot in running:
            request = self._at(slot)
            assert self._num_computed[slot] <= self._num_tokens[slot], "more rows scheduled than tokens"
            assert self._num_known[slot] <= self._num_tokens[slot] <= request.max_total, "too many tokens"
            assert self._num_computed[slot] <= self._capacity[slot], "rows scheduled without a block"
            assert self.kv.capacity(request.seq) == self._capacity[slot], "tables and capacity differ"
            assert request.slot == slot and not request.done, "slot and request disagree"
        assert [self._at(int(s)).order for s in self._running] == self._orders, (
            "running requests are out of order"
        )
        assert self._orders == sorted(self._orders), "running requests are not sorted"
        assert not any(table for r in waiting for table in r.seq.tables), "a waiting request holds blocks"
        assert self._stop_uses.min(initial=0) >= 0, "stop token counts went below zero"
        holders = [(self._at(s).seq, int(self._num_computed[s])) for s in running]
        self.kv.check(holders + [(request.seq, request.num_found) for request in self._loading])
