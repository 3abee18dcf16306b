"""The host tier's books against a plain model of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.kv.host_tier import HostTier

SLOTS = 4
entries = st.tuples(st.integers(0, 1), st.sampled_from([bytes([i]) for i in range(6)]))


class Books(RuleBasedStateMachine):
    """The model: slots being filled, blocks held by readers, and those nobody holds in their order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(SLOTS)
        self.filling: list[tuple[int, tuple | None]] = []  # slot, and its entry unless that was dropped
        self.readers: list[tuple[int, tuple | None]] = []
        self.idle: list[tuple] = []  # entries, oldest first
        self.slot_of: dict[tuple, int] = {}

    def _dropped(self, pairs, entry):
        return [(slot, None if e == entry else e) for slot, e in pairs]

    @rule(entry=entries)
    def reserve(self, entry):
        if self.tier.contains(*entry):
            return
        held = len({slot for slot, _ in self.filling + self.readers})
        evicts = held + len(self.idle) == SLOTS
        slot = self.tier.reserve(entry)
        if held == SLOTS:
            assert slot is None
            return
        assert slot is not None and slot not in {s for s, _ in self.filling + self.readers}
        if evicts:
            oldest = self.idle.pop(0)
            assert self.slot_of.pop(oldest) == slot
        self.filling.append((slot, entry))

    @rule(well=st.booleans(), which=st.integers(0, 9))
    def end(self, well, which):
        if not self.filling:
            return
        slot, entry = self.filling.pop(which % len(self.filling))
        (self.tier.filled if well else self.tier.failed)(slot)
        if well and entry is not None:
            self.slot_of[entry] = slot
            self.idle.append(entry)

    @rule(entry=entries)
    def read(self, entry):
        slot = self.tier.find(entry)
        assert slot == self.slot_of.get(entry)
        if slot is not None:
            self.tier.acquire([slot])
            self.readers.append((slot, entry))
            if entry in self.idle:
                self.idle.remove(entry)

    @rule(which=st.integers(0, 9))
    def done(self, which):
        if not self.readers:
            return
        slot, entry = self.readers.pop(which % len(self.readers))
        self.tier.release([slot])
        if entry is not None and entry not in [e for _, e in self.readers]:
            self.idle.append(entry)

    @rule(entry=entries)
    def touch(self, entry):
        self.tier.touch(entry)
        if entry in self.idle:
            self.idle.remove(entry)
            self.idle.append(entry)

    @rule(entry=entries)
    def drop(self, entry):
        self.tier.drop(entry)
        self._forget(entry)

    @rule()
    def clear(self):
        self.tier.clear()
        for _, entry in [*self.filling, *self.readers]:
            self._forget(entry)
        self.idle.clear()
        self.slot_of.clear()

    def _forget(self, entry):
        self.filling, self.readers = self._dropped(self.filling, entry), self._dropped(self.readers, entry)
        self.slot_of.pop(entry, None)
        if entry in self.idle:
            self.idle.remove(entry)

    @invariant()
    def agrees(self):
        self.tier.check([slot for slot, _ in self.filling + self.readers])
        assert dict(self.tier.findable()) == self.slot_of
        assert self.tier.num_used == len(self.tier.used_slots())
        assert self.tier.num_available == SLOTS - len({slot for slot, _ in self.filling + self.readers})


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_is_held_never_gives_way():
    tier = HostTier(2)
    first, second = tier.reserve((0, b"a")), tier.reserve((0, b"b"))
    assert tier.reserve((0, b"c")) is None
    tier.filled(first)
    tier.filled(second)
    tier.acquire([first])
    assert tier.reserve((0, b"c")) == second
    assert tier.find((0, b"b")) is None and tier.num_evicted == 1
    with pytest.raises(AssertionError, match="references differ"):
        tier.check([first])
    tier.check([first, second])


def test_a_key_of_another_group_is_another_block():
    tier = HostTier(2)
    tier.filled(tier.reserve((0, b"a")))
    assert tier.find((1, b"a")) is None and not tier.contains(1, b"a")
