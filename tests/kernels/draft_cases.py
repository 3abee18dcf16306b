"""Random cases for the kernels around drafts, and the check against the plain versions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from octavo.kernels import reference_drafts

SLOTS, LENGTH = 9, 90


def _both(kernels: ModuleType, name: str, device: str, args: list[Any], written: list[int]) -> None:
    """Call both on copies of `args`: what is written must be equal."""
    results = []
    for module, where in ((reference_drafts, "cpu"), (kernels, device)):
        own = [x.to(where, copy=True) if isinstance(x, torch.Tensor) else x for x in args]
        getattr(module, name)(*own)
        results.append([own[i].cpu() for i in written])
    for place, want, got in zip(written, *results, strict=True):
        assert torch.equal(want, got), (name, place)


def check_judge(
    kernels: ModuleType, drafts: list[int], given: bool, device: str = "cpu", padding: int = 2
) -> None:
    """A step of requests with so many drafts each, some of which are right."""
    generator = torch.Generator().manual_seed(sum(drafts) + len(drafts) + given)
    n, most = len(drafts), max(drafts) + 1
    table = torch.randint(4, (SLOTS, LENGTH), generator=generator, dtype=torch.int32)
    counts = torch.tensor([d + 1 for d in drafts] + [0] * padding)
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    slots = torch.cat((torch.randperm(SLOTS - 1, generator=generator)[:n], torch.full((padding,), SLOTS - 1)))
    ends = torch.randint(most, LENGTH - 1, (n,), generator=generator)
    ends = torch.cat((ends, torch.full((padding,), 7)))
    size = n + padding
    stands = torch.rand((size, most - 1), generator=generator) < 0.7 if given else None
    _both(
        kernels, "judge_drafts", device,
        [
            slots, starts, ends, torch.tensor(drafts + [0] * padding),
            torch.randint(4, (int(starts[-1]) + 3,), generator=generator, dtype=torch.int32), stands, table,
            torch.full((SLOTS,), 5), torch.zeros((size, most), dtype=torch.int32),
            torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int64),
        ],
        [6, 7, 8, 9, 10],
    )  # fmt: skip


def check_chance(kernels: ModuleType, n: int, most: int, device: str = "cpu") -> None:
    """Requests with so many drafts each, one of them padding without a state of its own."""
    generator = torch.Generator().manual_seed(n + most)
    bits = torch.randint(-(1 << 62), 1 << 62, (SLOTS - 1, 7), generator=generator)
    slots = torch.cat((torch.randperm(SLOTS - 1, generator=generator)[: n - 1], torch.tensor([SLOTS - 1])))
    _both(
        kernels, "stands_by_chance", device,
        [
            slots, torch.randint(most, LENGTH, (n,), generator=generator),
            torch.randint(0, most + 1, (n,), generator=generator), bits[:, 3],
            torch.rand(most + 2, generator=generator, dtype=torch.float64),
            torch.zeros((n, most), dtype=torch.bool),
        ],
        [5],
    )  # fmt: skip


def check_begin(kernels: ModuleType, n: int, device: str = "cpu") -> None:
    """Where a judged step's rows, and a head's drafts, come."""
    generator = torch.Generator().manual_seed(n)
    drafts = torch.randint(0, 5, (n,), generator=generator)
    counts = (torch.rand(n, generator=generator) * (drafts + 1)).int() + 1
    starts = torch.cat((torch.zeros(1), (drafts + 1).cumsum(0))).int()
    slots, begin = torch.randperm(n + 3, generator=generator)[:n], torch.randint(0, 20, (n + 3,))
    ends, blank = torch.randint(20, LENGTH, (n,), generator=generator), torch.full((n,), -99)
    places = [blank.clone() for _ in range(4)]
    _both(
        kernels, "begin_follow", device, [slots, starts, ends, drafts, counts, begin, *places], [6, 7, 8, 9]
    )
    _both(kernels, "begin_chain", device, [slots, ends, drafts, begin, *places[:3]], [4, 5, 6])


def check_place(
    kernels: ModuleType, counts: list[int], block_size: int, offset: int, device: str = "cpu"
) -> None:
    """Rows some of which are nobody's, some beyond their request's limit, some before position 0."""
    generator = torch.Generator().manual_seed(sum(counts) + block_size)
    n, rows = len(counts), sum(counts) + 3
    width = -(-LENGTH // block_size)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    first = torch.randint(-2, LENGTH - 5, (n,), generator=generator)
    limit = (first + torch.randint(-2, 9, (n,), generator=generator)).clamp(0, LENGTH)
    _both(
        kernels, "place_rows", device,
        [
            torch.randperm(SLOTS, generator=generator)[:n], starts, first, limit,
            torch.randint(3, (n,), generator=generator),
            torch.randint(1000, (SLOTS, LENGTH), generator=generator, dtype=torch.int32),
            torch.randint(50, (SLOTS, width), generator=generator, dtype=torch.int32),
            offset, block_size,
            torch.full((rows,), -7, dtype=torch.int32), torch.full((rows,), -7),
            torch.full((n,), -7, dtype=torch.int32), torch.full((n, width + 2), -7, dtype=torch.int32),
            torch.full((rows,), -7),
        ],
        [9, 10, 11, 12, 13],
    )  # fmt: skip


def check_append(kernels: ModuleType, offset: int, mapped: bool, device: str = "cpu") -> None:
    """Some requests are to have a draft there, some are not."""
    generator = torch.Generator().manual_seed(offset)
    ids = torch.randperm(1000, generator=generator) if mapped else None
    _both(
        kernels, "append_drafts", device,
        [
            torch.randperm(SLOTS, generator=generator)[:6], torch.randint(80, (6,), generator=generator),
            torch.tensor([0, 1, 2, 3, 4, 8]), torch.randint(1000, (6, 2), generator=generator)[:, 0], ids,
            torch.full((SLOTS, LENGTH), -7, dtype=torch.int32), offset,
        ],
        [5],
    )  # fmt: skip
