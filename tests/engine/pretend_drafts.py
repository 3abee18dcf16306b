"""A pretend model that drafts beside the pretend target (`simulation`), its KV in pages of the same pool."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.kv.draft_pages import draft_pages
from octavo.kv.format import KVFormat, KVGroup
from octavo.step_messages import StepPlan
from tests.engine import simulation as sim
from tests.engine.test_random_mixes import Reporting

_TAKEN: tuple[int, tuple[int, ...]] = (-2, ())


class _Counted(dict[int, Any]):
    """The target's cache; counts what it writes in each page."""

    def __init__(self, block_size: int):
        super().__init__()
        self._size = block_size
        self.writes: Counter[int] = Counter()

    def __setitem__(self, place: int, content: Any) -> None:
        self.writes[place // self._size] += 1
        super().__setitem__(place, content)


class Drafting(Reporting):
    """Drafts what the target says, right as often as `right`, from a cache that knows what was written in it.

    What drafts write in a page is nobody's KV for the target, and what that writes there is none for drafts.
    """

    cache: _Counted

    def __init__(
        self, config: EngineConfig, *args: Any, shape: tuple[int, int], draw: random.Random, right: float
    ):
        """`shape`: head size and layers of the draft, of one KV head; the target's layers have one of 1."""
        super().__init__(config, *args)
        fmt = KVFormat("float32", config.block_size, 1, shape[0])
        groups = [KVGroup("draft", tuple(range(shape[1])), fmt)]
        longest = self.facts.max_model_len
        self.facts = replace(self.facts, draft_groups=groups, draft_max_model_len=longest)
        self.pages = draft_pages(self.facts.groups, self.facts.draft_groups, self.facts.num_blocks)
        assert self.pages.blocks
        self.draw, self.right = draw, right
        self.draft_table = np.full(self.tokens.shape, -1, np.int64)
        self.valid = np.zeros(len(self.tokens), np.int64)
        # What drafts wrote, by draft block and place, and what the target had written in its pages till then.
        self.written: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        self.num_caught_up = 0

    def make_cache(self) -> _Counted:
        return _Counted(self.block_size)

    def _execute(self, plan: StepPlan) -> sim.Done:
        for admission in plan.admissions:
            self.valid[admission.slot] = 0
        done = super()._execute(plan)
        order = plan.propose
        if order is None or not order.counts.any():
            return done
        for update in order.updates:
            self.draft_table[update.slots, update.columns] = update.blocks
            self.valid[update.slots[update.columns == 0]] = 0
        for slot, count in zip(plan.slots.tolist(), order.counts.tolist(), strict=True):
            if count:
                self._draft(slot, count)
        return done

    def _draft(self, slot: int, count: int) -> None:
        known = int(self.computed[slot]) + 1
        text = self.tokens[slot, :known].tolist()
        for _ in range(count):
            right = self.draw.random() < self.right
            text.append(sim.next_token(tuple(text)) if right else self.draw.randrange(sim.VOCAB))
        self.tokens[slot, known : known + count] = text[known:]
        end = known + count - 1  # the last draft is no input
        self.num_caught_up += known - int(self.valid[slot]) > count + 2
        for p in range(min(int(self.valid[slot]), known - 1), end):
            self._write(*self._at(slot, p), tuple(text[: p + 1]))
        for p in range(end):
            block, place = self._at(slot, p)
            held = self.written[block * self.block_size + place]
            assert held == (tuple(text[: p + 1]), self._stamps(block)), "a draft read other KV"
        # Of drafts that don't stand nothing is left.
        self.valid[slot] = known

    def _at(self, slot: int, position: int) -> tuple[int, int]:
        block = int(self.draft_table[slot, position // self.block_size])
        assert block >= 0, "a draft's row has no block"
        return block, position % self.block_size

    def _write(self, block: int, place: int, text: tuple[int, ...]) -> None:
        """Store a row of the draft: the target's KV in all pages that its block lies in is lost."""
        pages = self._pages_of(block)
        for page in pages:
            for i in range(self.block_size):
                dict.__setitem__(self.cache, page * self.block_size + i, _TAKEN)
        self.written[block * self.block_size + place] = (text, self._stamps(block))

    def _stamps(self, block: int) -> list[int]:
        return [self.cache.writes[page] for page in self._pages_of(block)]

    def _pages_of(self, block: int) -> list[int]:
        pages, found = self.pages, set()
        for layer in range(pages.layers):
            begin = (pages.first_row(layer) + block) * pages.unit % pages.buffer_bytes
            found |= set(range(begin // pages.piece, (begin + pages.unit - 1) // pages.piece + 1))
        return sorted(found)
