"""Draft blocks in pages of the target's pool: which bytes they are, and who holds them."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv.draft_blocks import DraftBlocks
from octavo.kv.draft_pages import draft_pages
from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.groups import group_layers
from octavo.kv.pool import BlockPool
from octavo.worker.kv_cache import allocate_caches, draft_caches, page_buffers

CPU = torch.device("cpu")


def groups_of(layers: int, dtype: str, heads: int, dim: int, windows: int = 0) -> list[KVGroup]:
    fmt = KVFormat(dtype, 4, heads, dim)
    return group_layers([(None, fmt)] * layers + [(9, fmt)] * windows)


sizes = st.tuples(
    st.integers(1, 6),
    st.sampled_from(["float32", "bfloat16", "int8", "fp8"]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([4, 8, 12]),
    st.sampled_from([0, 0, 2]),
)
draft_sizes = st.tuples(
    st.integers(1, 6),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([4, 8]),
)


@settings(max_examples=120, deadline=None)
@given(sizes, draft_sizes, st.integers(0, 70))
def test_a_draft_block_is_memory_of_its_run_alone(target, draft, more):
    """Written through the caches of the draft's layers, read as bytes of the target's pages."""
    groups, own = groups_of(*target), groups_of(*draft)
    wanted = draft_pages(groups, own, 64).run
    pages = draft_pages(groups, own, num_pages := 2 * wanted + more)
    assert pages.blocks > 0
    caches = allocate_caches(groups, num_pages, CPU, pages)
    drafts = draft_caches(caches, own, pages)
    assert [tuple(c.shape[1:]) for c in drafts] == [own[0].format.layer_block_shape()] * draft[0]
    assert all(c.is_contiguous() for c in (*caches, *drafts))
    buffers = page_buffers(caches)
    assert sum(b.nbytes for b in buffers) == num_pages * max(g.block_bytes() for g in groups)
    for first in {0, wanted, num_pages // wanted * wanted - wanted}:
        written = {}
        for number in range(pages.blocks):
            block, mark = pages.block_id(first, number), 1 + number % 3
            for layer in own[0].layers:
                assert not drafts[layer][block].any(), "two blocks share memory"
                drafts[layer][block] = mark
                written[layer, block] = mark
        for (layer, block), mark in written.items():
            assert (drafts[layer][block] == mark).all()
        outside = [b[:first].any() | b[first + wanted :].any() for b in buffers]
        assert not any(outside), "memory of a page that was not lent"
        for buffer in buffers:
            buffer[first : first + wanted] = 0
        assert not any(cache.any() for cache in drafts), "memory of no page"


@pytest.mark.parametrize(
    ("target", "draft", "run", "blocks"),
    [
        ((32, "bfloat16", 8, 128), (4, "bfloat16", 8, 128), 1, 8),  # a few of the target's own layers
        ((32, "bfloat16", 8, 128), (16, "bfloat16", 8, 64), 1, 4),  # Llama 3.1 8B, 3.2 1B
        ((32, "bfloat16", 8, 128), (1, "bfloat16", 8, 128), 1, 32),  # an EAGLE-3 head
        ((32, "fp8", 8, 128), (1, "bfloat16", 8, 128), 2, 32),  # beside a cache of half the bytes
        ((80, "bfloat16", 1, 128), (16, "bfloat16", 8, 64), 4, 5),  # one of 8 ranks has a head of 8
        ((2, "bfloat16", 8, 128), (6, "bfloat16", 2, 128), 3, 4),  # more layers than the target has
    ],
)
def test_what_runs_of_pages_hold(target, draft, run, blocks):
    pages = draft_pages(groups_of(*target), groups_of(*draft), 1000)
    assert (pages.run, pages.blocks) == (run, blocks)
    assert pages.pages_for(blocks + 1) == 2 * run


def test_a_draft_that_no_run_holds():
    pages = draft_pages(groups_of(1, "fp8", 1, 4), groups_of(6, "float32", 8, 64), 1000)
    assert pages.blocks == 0


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_page_is_somebodys(seed):
    """Requests and drafts come and go: ids of draft blocks are those of pages held, and nothing is lost."""
    draw = random.Random(seed)
    target = groups_of(draw.randint(1, 4), draw.choice(["float32", "fp8"]), draw.randint(1, 3), 8)
    own = groups_of(draw.randint(1, 3), "float32", draw.randint(1, 3), 4, draw.choice([0, 2]))
    num_pages, slots = draw.randint(8, 80), 5
    pages, pool = draft_pages(target, own, num_pages), BlockPool(num_pages)
    blocks = DraftBlocks(own, pages, pool, slots, next_blocks=2)
    ids = {pages.block_id(p, n): p for p in range(0, num_pages, pages.run) for n in range(pages.blocks)}
    lengths, tables = [0] * slots, [{} for _ in range(slots)]
    held: list[list[int]] = []
    names = 0
    for _ in range(200):
        slot, tokens, running = draw.randrange(slots), draw.randint(1, 60), draw.randint(0, 3)
        kind = draw.choice(["extend", "extend", "release", "allocate", "free"])
        if kind == "extend":
            before = (pool.num_free, blocks.num_held)
            if blocks.extend(slot, tokens, running):
                if tokens > lengths[slot]:
                    lengths[slot] = tokens
                if blocks.num_held > before[1]:
                    assert pool.num_free >= 2 * running, "running requests' next blocks are gone"
            else:
                assert (pool.num_free, blocks.num_held) == before
        elif kind == "release":
            blocks.release(slot)
            lengths[slot], tables[slot] = 0, {}
        elif kind == "allocate" and pool.num_free >= (count := draw.randint(1, 6)):
            held.append(pool.allocate(count))
            for block in held[-1][: draw.randint(0, count)]:  # found again once it is free
                pool.register(0, b"%d" % (names := names + 1), block)
        elif kind == "free" and held:
            pool.release(held.pop(draw.randrange(len(held))))
        for group, update in enumerate(blocks.take_updates()):
            for at, column, block in zip(update.slots, update.columns, update.blocks, strict=True):
                assert (group, int(column)) not in tables[at]
                tables[at][group, int(column)] = int(block)
        for table, length in zip(tables, lengths, strict=True):
            assert set(table) == {(g, c) for g in range(len(own)) for c in range(-(-length // 4))}
        lent = blocks.held()
        for slot, table in enumerate(tables):
            assert len(set(table.values())) == len(table)
            assert {ids[block] for block in table.values()} <= set(lent[slot])
            assert len(lent[slot]) == pages.pages_for(len(table)) == blocks.held_by(slot)
        pool.check([*held, *lent])
    for slot in range(slots):
        blocks.release(slot)
    assert blocks.num_held == 0 and pool.num_used == sum(map(len, held))


def test_texts_that_are_cached_give_way_to_a_part_of_the_pool():
    groups = groups_of(1, "float32", 1, 4)
    pool = BlockPool(40)
    blocks = DraftBlocks(groups, draft_pages(groups, groups, 40), pool, 2)
    table = pool.allocate(40)
    for block in table[8:]:
        assert pool.register(0, b"%d" % block, block)
    pool.release(table)
    assert blocks.extend(0, 4 * 8, 0) and pool.evictions == 0  # those that nobody can find
    assert blocks.num_held == 8 > blocks.kept == 6
    assert not blocks.extend(1, 4, 0)
    blocks.release(0)
    other = pool.allocate(8)
    assert blocks.extend(1, 4 * 6, 0) and pool.evictions == 6
    assert not blocks.extend(1, 4 * 7, 0)
    pool.check([other, *blocks.held()])
