"""With how many blocks requests begin in common, as they come and go."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.kv.shared_prefix import SharedPrefix, common_beginning


@pytest.mark.parametrize("guess", [0, 1, 3, 4, 100])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64])
def test_common_beginning(length: int, guess: int) -> None:
    head = list(range(1000, 1000 + length))
    for a, b in [([], []), ([1], [2]), ([1, 5, 5], [2, 5, 5]), ([1], []), ([1, 5], [2, 6])]:
        assert common_beginning(head + a, head + b, guess) == length
    assert common_beginning(head, list(head), length) == length


@pytest.mark.parametrize("groups", [(0,), (0, 2), ()])
def test_equals_a_comparison_of_all(groups: tuple[int, ...]) -> None:
    """Requests of three families, of which more or less is shared, enter, grow and leave at random."""
    rng = random.Random(len(groups))
    shared, fresh = SharedPrefix(8, groups), iter(range(10**6, 10**7))
    heads = [[[next(fresh) for _ in range(12)] for _ in range(3)] for _ in range(3)]
    tables: dict[int, list[list[int]]] = {}
    exact = some = 0
    for _ in range(3000):
        slot, family = rng.randrange(8), 0 if rng.random() < 0.9 else rng.randrange(3)
        if slot in tables:
            if rng.random() < 0.4:
                for table in tables[slot]:
                    table.append(next(fresh))
            else:
                shared.leave(slot)
                for table in tables.pop(slot):
                    table.clear()
        else:
            length = rng.choice([0, 5, 12, 12])
            tables[slot] = [[*head[:length], next(fresh), next(fresh)] for head in heads[family]]
            shared.enter(slot)
        running = sorted(tables)
        if len(running) < 2 or rng.random() < 0.2:
            continue
        chosen = running if rng.random() < 0.7 else rng.sample(running, 2)
        got = shared.count(np.array(chosen), tables.__getitem__)
        columns = [zip(*(tables[s][g] for s in chosen), strict=False) for g in groups]
        want = min((next(i for i, c in enumerate(each) if len(set(c)) > 1) for each in columns), default=0)
        assert got <= want
        if chosen == running:
            assert got == want
            exact += 1
            some += want > 0
    assert exact > 500 and (some > 50 or not groups)
