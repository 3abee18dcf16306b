"""Block tables of running requests: growing, shrinking, and what a step tells the workers of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from octavo.engine.slots import Slots
from octavo.kv.manager import KVManager
from octavo.step_messages import BlockUpdate

TableChanges = list[tuple[int, int, int]]  # of one KV group: slot, column, block
_NO_UPDATE = BlockUpdate(*np.zeros((3, 0), np.int32))


def grow_by_one(
    slots: Slots, kv: KVManager, own: np.ndarray, rows: np.ndarray, changes: Sequence[TableChanges]
) -> bool:
    """Give each request in slots `own` one more block, if all need just that and have one table."""
    if len(changes) > 1 or (rows > 1).any() or len(own) > kv.pool.num_free:
        return False
    tables = [slots.at(slot).seq.tables[0] for slot in own.tolist()]
    blocks = kv.pool.allocate(len(tables))
    for slot, table, block in zip(own.tolist(), tables, blocks, strict=True):
        changes[0].append((slot, len(table), block))
        table.append(block)
    slots.capacity[own] += kv.block_size
    return True


def lacking_blocks(slots: Slots, kv: KVManager, run: np.ndarray, rows: np.ndarray) -> int:
    """How many more blocks than are free the next step's rows (int32 `[n]`) of slots `run` may need."""
    over = slots.num_computed[run] + rows - slots.capacity[run]
    blocks = int((-(-over[over > 0] // kv.block_size)).sum()) * len(kv.groups)
    return max(0, blocks - kv.pool.num_free)


def drop_drafts(slots: Slots, kv: KVManager, run: np.ndarray, rows: np.ndarray) -> None:
    """Where blocks are short, let those drafts alone be judged that need no block: drafts preempt no one.

    Args:
        rows: int32 `[n]`, of the step, drafts included; changed.
    """
    drafts = slots.num_drafts[run]
    if drafts.any() and lacking_blocks(slots, kv, run, rows):
        held = slots.capacity[run] - slots.num_computed[run]  # rows for which there are blocks
        kept = np.clip(held - (rows - drafts), 0, drafts)
        rows -= drafts - kept
        slots.num_drafts[run] = kept


def free_passed(slots: Slots, kv: KVManager, own: np.ndarray) -> None:
    """Free the blocks that the windows of requests in slots `own` have passed."""
    computed = slots.num_computed[own] - slots.in_doubt[own]
    gone = computed >= slots.passing[own]
    for slot, position in zip(own[gone].tolist(), computed[gone].tolist(), strict=True):
        slots.passing[slot] = kv.free_passed(slots.at(slot).seq, position)


def give_back_spare(slots: Slots, kv: KVManager, run: np.ndarray, rows: np.ndarray) -> int:
    """Free the blocks in which drafts of requests in slots `run` were that did not stand; how many that were.

    Args:
        rows: int32 `[n]`, that the next step computes of each.
    """
    ends = np.maximum(slots.num_tokens[run], slots.num_computed[run] + rows)
    spare, freed = np.flatnonzero(slots.capacity[run] - ends >= kv.block_size), 0
    for slot, end in zip(run[spare].tolist(), ends[spare].tolist(), strict=True):
        request = slots.requests[slot]
        if request is not None:
            freed += kv.shrink(request.seq, end)
            slots.capacity[slot] = kv.capacity(request.seq)
    return freed


def extend(slots: Slots, kv: KVManager, slot: int, end: int, changes: Sequence[TableChanges]) -> int:
    """Extend a request's tables to hold `end` tokens, or what there are blocks for; returns that."""
    seq = slots.at(slot).seq
    new = kv.grow(seq, end)
    if new is None:
        end = kv.fit(seq, end)
        new = kv.grow(seq, end)
        assert new is not None
    for group, table, blocks in zip(changes, seq.tables, new, strict=True):
        first = len(table) - len(blocks)
        group += [(slot, first + j, block) for j, block in enumerate(blocks)]
    slots.capacity[slot] = kv.capacity(seq)
    return end


def keep_running(slots: Slots, changes: list[TableChanges]) -> None:
    """Take out the changes of requests that have left their slots."""
    for group, entries in enumerate(changes):
        changes[group] = [entry for entry in entries if slots.requests[entry[0]] is not None]


def block_updates(changes: Sequence[TableChanges]) -> list[BlockUpdate]:
    """The changes as a plan holds them."""
    return [BlockUpdate(*np.array(c, np.int32).T) if c else _NO_UPDATE for c in changes]


def shared_blocks(
    slots: Slots, own: np.ndarray, counts: np.ndarray, start: np.ndarray, block_size: int
) -> int:
    """See `StepPlan.shared_blocks`."""
    if len(own) < 2 or counts.max() > 1:
        return 0
    tables_at: Callable[[int], list[list[int]]] = lambda slot: slots.at(slot).seq.tables  # noqa: E731
    shared = slots.shared.count(own, tables_at)
    # A block that is filled in this step may be shared already, but has to be written first.
    return min(shared, int((start - slots.in_doubt[own]).min()) // block_size) if shared else 0
