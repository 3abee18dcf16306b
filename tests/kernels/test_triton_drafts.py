"""The Triton kernels around drafts against their plain twins (interpreted where there is no GPU), and these
against a loop."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference_drafts
from tests.kernels.draft_cases import check_append, check_begin, check_chance, check_judge, check_place

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("drafts", [[1], [5], [3, 3, 3], [0, 4, 1, 2, 4], [2, 0, 0]])
def test_judging_equals_the_twin(drafts, given):
    from octavo.kernels.triton import drafts as kernels

    check_judge(kernels, drafts, given, DEVICE)


@pytest.mark.parametrize("block_size, offset", [(8, 0), (16, 3)])
@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 2], [6], [3, 0, 5, 1]])
def test_placing_equals_the_twin(counts, block_size, offset):
    from octavo.kernels.triton import drafts as kernels

    check_place(kernels, counts, block_size, offset, DEVICE)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("offset", [0, 2])
def test_appending_equals_the_twin(offset, mapped):
    from octavo.kernels.triton import drafts as kernels

    check_append(kernels, offset, mapped, DEVICE)


@pytest.mark.parametrize("n, most", [(1, 1), (3, 5), (8, 24)])
def test_chance_equals_the_twin(n, most):
    from octavo.kernels.triton import drafts as kernels

    check_chance(kernels, n, most, DEVICE)


@pytest.mark.parametrize("n", [1, 6, 300])
def test_beginnings_equal_the_twin(n):
    from octavo.kernels.triton import drafts as kernels

    check_begin(kernels, n, DEVICE)


def test_beginnings_by_hand():
    """A head that follows from position 4 on; twelve tokens computed, the last two as drafts: one stood."""
    first, limit, shift, last = (torch.zeros(1, dtype=torch.int64) for _ in range(4))
    one = torch.ones(1, dtype=torch.int64)
    begin = torch.tensor([0, 4])
    reference_drafts.begin_follow(
        one, torch.tensor([0, 3], dtype=torch.int32), 12 * one, 2 * one, torch.tensor([2], dtype=torch.int32),
        begin, first, limit, shift, last,
    )  # fmt: skip
    # Rows of positions 9, 10, 11 of the text; the token behind 10 is the newest.
    assert [int(x) for x in (first, limit, shift, last)] == [5, 8, 5, 1]
    reference_drafts.begin_chain(one, 12 * one, 3 * one, begin, first, limit, shift)
    assert [int(x) for x in (first, limit, shift)] == [6, 9, 5]
    reference_drafts.begin_chain(one, 12 * one, 0 * one, begin, first, limit, shift)
    assert int(limit) == 0


@pytest.mark.parametrize("sizes", [(1,), (700,), (5, 3), (512, 2)])
def test_tokens_are_copied_out(sizes):
    from octavo.kernels.triton.copy_out import copy_out

    pinned = {"pin_memory": True} if DEVICE == "cuda" else {}
    sources = [torch.randint(1 << 30, (size,), dtype=torch.int32, device=DEVICE) for size in sizes]
    places = [torch.full((size + 3,), -1, dtype=torch.int32, **pinned) for size in sizes]
    copy_out([(x, place[: len(x)]) for x, place in zip(sources, places, strict=True)])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for x, place in zip(sources, places, strict=True):
        assert place.tolist() == [*x.tolist(), -1, -1, -1]


def test_judging_by_hand():
    """Three requests: two of three drafts stand; none of two; one without drafts; then padding."""
    table = torch.zeros((5, 12), dtype=torch.int32)
    table[0, :8] = torch.tensor([9, 9, 9, 9, 9, 1, 2, 3])
    table[2, :5] = torch.tensor([9, 9, 9, 4, 5])
    table[3, :3] = 9
    computed, tokens = torch.zeros(5, dtype=torch.int64), torch.zeros((4, 4), dtype=torch.int32)
    counts, known = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    chosen = torch.tensor([1, 2, 7, 8, 6, 5, 6, 3, 0, 0], dtype=torch.int32)
    reference_drafts.judge_drafts(
        torch.tensor([0, 2, 3, 4]), torch.tensor([0, 4, 7, 8, 8], dtype=torch.int32),
        torch.tensor([8, 5, 3, 0]), torch.tensor([3, 2, 0, 0]),
        chosen, None, table, computed, tokens, counts, known,
    )  # fmt: skip
    assert counts[:3].tolist() == [3, 1, 1] and known[:3].tolist() == [8, 4, 4]
    assert tokens[0, :3].tolist() == [1, 2, 7] and tokens[1, 0] == 6 and tokens[2, 0] == 3
    assert table[0, 5:8].tolist() == [1, 2, 7] and table[2, 3] == 6 and table[3, 3] == 3
    assert computed[[0, 2, 3]].tolist() == [7, 3, 3]


def test_placing_by_hand():
    """Positions 3 and 4 of a request that may have rows below 4; padding; a row of nobody's."""
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    blocks = torch.tensor([[5, 6], [7, 8], [0, 0]], dtype=torch.int32)
    ids, positions = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    lens, rows, mapping = (
        torch.zeros(2, dtype=torch.int32),
        torch.zeros((2, 3), dtype=torch.int32),
        positions.clone(),
    )
    reference_drafts.place_rows(
        torch.tensor([1, 2]), torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([2, -2]),
        torch.tensor([4, 0]), torch.tensor([1, 0]), table, blocks, 1, 2, ids, positions, lens, rows, mapping,
    )  # fmt: skip
    assert ids[0] == 24 and positions[0] == 3 and mapping.tolist() == [8 * 2 + 1, -1, -1]
    assert positions[1] == 3 and positions[2] == 0
    assert lens[0] == 5 and rows[0, :2].tolist() == [7, 8]
