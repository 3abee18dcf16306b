"""The state of running requests: arrays by slot, so that a step touches only what changes."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np

from octavo.engine.intervals import TokenIntervals
from octavo.engine.news import News
from octavo.engine.request import Request
from octavo.kv.manager import NEVER, KVManager
from octavo.kv.shared_prefix import SharedPrefix
from octavo.step_messages import Admission


class Slots:
    """Owns the slots `0 .. num_slots - 1`, of which each running request has one, and what is kept by slot.

    Attributes, all by slot but for `running`, `orders` and `stop_uses`:
        num_tokens: tokens that are known or being sampled; while drafts are judged, as if all stood.
        num_known: tokens that are known; `tokens` are these.
        num_computed: tokens whose rows are scheduled; while drafts are judged, as if all stood.
        num_drafts: drafts among the rows of the step that was planned last.
        in_doubt: drafts that steps in flight judge; so many fewer tokens may turn out to be computed.
        sampled_in: the last step that samples for the request in its slot (-1: none has yet).
        num_registered: blocks offered to the prefix cache.
        capacity: tokens that all block tables hold.
        passing: computed tokens that let a window free blocks.
        prompt_len, max_total: tokens of the prompt, and at which the request ends.
        ends_at_limit: nothing ends the request before that.
        last_turn: when the request was served last, of those that take turns.
        epoch: grows when a slot changes hands.
        running: the slots in use, in the requests' order (int64); `orders` are these.
        masked: tokens are drawn under a mask.
        held: no rows until the next token's mask has been made.
        stop_uses: by token, requests in slots that it ends.
        num_left: requests that have left a slot since the start.
        on_enter, on_leave: called with a request that is in its slot now, and still.
    """

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int, kv: KVManager):
        self._kv = kv
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.num_known = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_registered = np.zeros(num_slots, np.int32)
        self.capacity = np.zeros(num_slots, np.int32)
        self.passing = np.full(num_slots, NEVER, np.int32)
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.max_total = np.zeros(num_slots, np.int32)
        self.ends_at_limit = np.zeros(num_slots, bool)
        self.last_turn = np.zeros(num_slots, np.int64)
        self._turns = 0
        self.epoch = np.zeros(num_slots, np.int64)
        self.wants_prompt_logprobs = np.zeros(num_slots, bool)
        self.masked = np.zeros(num_slots, bool)
        self.held = np.zeros(num_slots, bool)
        self.tokens = np.zeros((num_slots, max_model_len), np.int32)
        self.num_drafts = np.zeros(num_slots, np.int32)
        self.in_doubt = np.zeros(num_slots, np.int32)
        self.sampled_in = np.full(num_slots, -1, np.int64)
        self.on_enter: list[Callable[[Request], None]] = []
        self.on_leave: list[Callable[[Request], None]] = []
        self.running = np.zeros(0, np.int64)
        self.orders: list[tuple[int, int]] = []
        self.stop_uses = np.zeros(vocab_size, np.int32)
        self.shared = SharedPrefix(num_slots, kv.full_groups)
        self.news = News(num_slots)
        self.intervals = TokenIntervals(num_slots)
        self.requests: list[Request | None] = [None] * num_slots
        self.num_left = 0
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that no request has."""
        return len(self._free)

    def at(self, slot: int) -> Request:
        """The request in a slot."""
        request = self.requests[slot]
        assert request is not None
        return request

    def known(self, request: Request) -> np.ndarray:
        """All tokens that are known of a request, in a slot or not."""
        slot = request.slot
        return request.token_ids if slot < 0 else self.tokens[slot, : self.num_known[slot]]

    def take_turns(self, slots: np.ndarray) -> None:
        """Some are served, int64 `[n]`, one after the other."""
        self.last_turn[slots] = self._turns + np.arange(len(slots))
        self._turns += len(slots)

    def enter(self, request: Request, computed: int) -> Admission:
        """Put a request into a free slot, `computed` of its tokens being in the cache already."""
        slot = request.slot = self._free.pop()
        tokens, core = request.token_ids, request.core
        self.requests[slot] = request
        self.tokens[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = self.num_known[slot] = len(tokens)
        self.num_computed[slot] = computed
        self.num_registered[slot] = computed // self._kv.block_size
        self.capacity[slot] = self._kv.capacity(request.seq)
        self.passing[slot] = self._kv.free_passed(request.seq, computed)
        self.shared.enter(slot)
        self.prompt_len[slot] = request.prompt_len
        self.max_total[slot] = request.max_total
        self.ends_at_limit[slot] = request.ends_at_limit
        self.last_turn[slot] = self._turns
        self.masked[slot] = request.grammar is not None
        self.held[slot] = False
        if request.grammar is not None:
            request.grammar.pending = 0
        self.news.enter(request)
        self.intervals.enter(request)
        self.wants_prompt_logprobs[slot] = request.wants_prompt_logprobs
        for token in request.stop_ids:
            self.stop_uses[token] += 1
        place = bisect.bisect(self.orders, request.order)
        self.orders.insert(place, request.order)
        self.running = np.insert(self.running, place, slot)
        self.num_drafts[slot] = self.in_doubt[slot] = 0
        self.sampled_in[slot] = -1
        for call in self.on_enter:
            call(request)
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

    def leave(self, request: Request) -> None:
        """Take a request out of its slot and free its blocks."""
        slot = request.slot
        request.token_ids = self.tokens[slot, : self.num_known[slot]].copy()
        self.news.leave(request)
        self.intervals.leave(request)
        self.epoch[slot] += 1
        self.shared.leave(slot)
        self.requests[slot] = None
        self._free.append(slot)
        self.num_left += 1
        for token in request.stop_ids:
            self.stop_uses[token] -= 1
        place = bisect.bisect_left(self.orders, request.order)
        del self.orders[place]
        self.running = np.delete(self.running, place)
        self._kv.free(request.seq)
        for call in self.on_leave:
            call(request)
        request.slot = -1

    def take_back(self, slots: np.ndarray, drafts: np.ndarray, counts: np.ndarray) -> None:
        """Drafts were judged: those that did not stand are neither known nor computed.

        Args:
            slots: integer `[n]`, each once.
            drafts: int32 `[n]`, how many there were.
            counts: int32 `[n]`, tokens that the step yielded: the drafts that stood, and one.
        """
        wrong = drafts + 1 - counts
        self.num_tokens[slots] -= wrong
        self.num_computed[slots] -= wrong
        self.in_doubt[slots] -= drafts

    def register(self, slots: np.ndarray, computed: np.ndarray, step: int) -> None:
        """Offer full blocks of known tokens to the prefix cache.

        Args:
            slots: integer `[n]`.
            computed: integer `[n]`, tokens whose rows are scheduled, the last of them by step `step`.
        """
        size = self._kv.block_size
        if self._kv.hasher is None:
            return
        ready = np.minimum(computed, self.num_known[slots])
        full = ready // size > self.num_registered[slots]
        if not full.any():
            return
        slots, ready = slots[full], ready[full]
        for slot, count in zip(slots.tolist(), ready.tolist(), strict=True):
            self._kv.register(self.at(slot).seq, self.tokens[slot], count, step)
        self.num_registered[slots] = ready // size

    def check(self) -> None:
        """Verify the invariants of the slots (for tests).

        Raises:
            AssertionError: naming the first violation.
        """
        running = {int(slot) for slot in self.running}
        assert len(running) == len(self.running), "a slot runs twice"
        assert running == {s for s, r in enumerate(self.requests) if r is not None}, (
            "slots and requests differ"
        )
        assert running.isdisjoint(self._free), "a running slot is free"
        assert len(running) + len(self._free) == len(self.requests), "a slot is lost"
        for slot in running:
            request = self.at(slot)
            assert self.num_computed[slot] <= self.num_tokens[slot], "more rows scheduled than tokens"
            assert self.num_known[slot] <= self.num_tokens[slot] <= request.max_total, "too many tokens"
            assert self.num_computed[slot] <= self.capacity[slot], "rows scheduled without a block"
            assert self._kv.capacity(request.seq) == self.capacity[slot], "tables and capacity differ"
            assert request.slot == slot and not request.done, "slot and request disagree"
        assert [self.at(int(s)).order for s in self.running] == self.orders, (
            "running requests are out of order"
        )
        assert self.orders == sorted(self.orders), "running requests are not sorted"
        assert self.stop_uses.min(initial=0) >= 0, "stop token counts went below zero"
