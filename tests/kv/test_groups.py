"""Layers in groups of equal pages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from octavo.errors import ModelError
from octavo.kv.format import KVFormat
from octavo.kv.groups import describe_pool, group_layers, layers_per_page, page_bytes, stage_groups

FORMAT = KVFormat("bfloat16", 16, 2, 64)


def groups_of(windows):
    return group_layers([(window, FORMAT) for window in windows])


def pattern(layers: int, every: int, window: int = 512) -> list[int | None]:
    """Every so-many-th layer sees all, as in Gemma 3."""
    return [None if (i + 1) % every == 0 else window for i in range(layers)]


@pytest.mark.parametrize(
    "windows, size, full, sliding",
    [
        ([None] * 24, 24, 1, 0),
        ([4096] * 32, 32, 0, 1),
        (pattern(18, 6), 3, 1, 5),  # Gemma 3 270M: 15 + 3
        (pattern(26, 6), 4, 1, 6),  # Gemma 3 1B: 22 + 4
        (pattern(34, 6), 5, 1, 6),  # Gemma 3 4B: 29 + 5
        (pattern(48, 6), 8, 1, 5),  # Gemma 3 12B: 40 + 8
        (pattern(62, 6), 10, 1, 6),  # Gemma 3 27B: 52 + 10
        (pattern(26, 2), 13, 1, 1),  # Gemma 2 2B
        ([None, 9, 9], 1, 1, 2),
        ([8, None, 9, None], 1, 2, 2),
    ],
)
def test_sizes_of_groups(windows, size, full, sliding):
    groups = groups_of(windows)
    kinds = [group.sliding_window for group in groups]
    assert kinds[:full] == [None] * full
    assert len(kinds) - full == sliding
    assert None not in kinds[full:]
    assert layers_per_page(groups) == size
    assert page_bytes(groups) == size * FORMAT.layer_block_bytes()
    assert all(len(group.layers) <= size for group in groups)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert list(group.layers) == sorted(group.layers)
        assert {windows[layer] for layer in group.layers} == {group.sliding_window}
        assert group.name == ("full" if group.sliding_window is None else f"sliding_{group.sliding_window}")


def test_layers_of_a_kind_are_split_in_their_order():
    assert [group.layers for group in groups_of(pattern(18, 6))] == [
        (5, 11, 17), (0, 1, 2), (3, 4, 6), (7, 8, 9), (10, 12, 13), (14, 15, 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "windows, bounds, groups, stages",
    [
        ([None] * 5, (0, 3, 5), [(0, 1, 2, 3, 4)], [[(0, 1, 2)], [(0, 1)]]),
        # A window's layers on the first stage alone: the others have tables for them, and no layers.
        ([9, 9, None, None], (0, 2, 4), [(2, 3), (0, 1)], [[(), (0, 1)], [(0, 1), ()]]),
        ([9, None, 9, None], (0, 2, 4), [(1, 3), (0, 2)], [[(1,), (0,)], [(1,), (0,)]]),
        ([9, 9, None, 9, 9, None], (0, 5, 6), [(2, 5), (0,), (1,), (3,), (4,)], None),
    ],
)
def test_stages_have_a_part_of_every_group(windows, bounds, groups, stages):
    found = group_layers([(window, FORMAT) for window in windows], bounds)
    assert [group.layers for group in found] == groups
    parts = [stage_groups(found, range(first, stop)) for first, stop in itertools.pairwise(bounds)]
    for part, (first, stop) in zip(parts, itertools.pairwise(bounds), strict=True):
        assert sorted(i for group in part for i in group.layers) == list(range(stop - first))
        assert [(g.name, g.sliding_window) for g in part] == [(g.name, g.sliding_window) for g in found]
    if stages is not None:
        assert [[group.layers for group in part] for part in parts] == stages


def test_blocks_of_unequal_bytes_are_refused_in_one_line():
    other = replace(FORMAT, num_kv_heads=4)
    with pytest.raises(ModelError, match="blocks of 8192 and 16384 bytes") as caught:
        group_layers([(None, FORMAT), (512, other)])
    assert "\n" not in str(caught.value)


def test_formats_of_equal_bytes_are_groups_of_their_own():
    other = replace(FORMAT, num_kv_heads=4, head_dim=32)
    groups = group_layers([(None, FORMAT), (None, other)])
    assert [(group.layers, group.format) for group in groups] == [((0,), FORMAT), ((1,), other)]


def test_the_log_line_tells_pages_and_groups():
    assert describe_pool(groups_of([None] * 4), 100) == "100 blocks of 16 tokens"
    assert (
        describe_pool(groups_of([9] * 4), 100) == "100 blocks of 16 tokens x 4 layers (groups: 1 sliding_9)"
    )
    line = describe_pool(groups_of(pattern(18, 6)), 100)
    assert line == "100 blocks of 16 tokens x 3 layers (groups: 1 full + 5 sliding_512)"
