"""Memory that is lent to tensors: nobody's piece is another's while it is held, and what was given back is
lent again."""

from __future__ import annotations

import gc
import random

import torch

from octavo.kernels.cpu import step_memory
from octavo.kernels.cpu.step_memory import Lender, StepMemory


def numbers(lender: Lender, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return lender.empty(size, torch.empty(size, device="meta").stride(), dtype)


def test_pieces_that_are_held_never_overlap() -> None:
    lender, rng = Lender(memory := StepMemory()), random.Random(3)
    held: list[tuple[torch.Tensor, int]] = []
    most = 0
    for i in range(2000):
        if held and rng.random() < 0.5:
            x, number = held.pop(rng.randrange(len(held)))
            assert bool((x == number).all())
        else:
            dtype = rng.choice([torch.float32, torch.int16, torch.int64])
            x = numbers(lender, rng.randint(1, 40), rng.randint(1, 300), dtype=dtype)
            assert x.data_ptr() % 64 == 0
            x.fill_(i)
            # A view of some rows is enough to hold it.
            held.append((x[x.shape[0] // 2 :], i))
        most = max(most, sum(y.untyped_storage().nbytes() for y, _ in held))
        del x
    assert all(bool((x == number).all()) for x, number in held)
    assert most <= memory.num_bytes <= 3 * most


def test_the_place_of_what_is_gone_is_lent_again() -> None:
    lender = Lender(memory := StepMemory())
    first, second = numbers(lender, 1000), numbers(lender, 50)
    place = first.data_ptr()
    view = first.view(10, 100)[2:]
    del first
    assert numbers(lender, 1000).data_ptr() != place
    del view
    gc.collect()
    assert numbers(lender, 900).data_ptr() == place
    assert memory.num_bytes < 4 * 2200
    assert second.data_ptr() == place + 4032  # whole lines


def test_strides_are_kept() -> None:
    x = Lender(StepMemory()).empty((3, 4), (1, 3), torch.float32)
    assert x.stride() == (1, 3) and x.untyped_storage().nbytes() == 48
    x.copy_(torch.arange(12).view(3, 4))
    assert x.tolist() == torch.arange(12).view(3, 4).tolist()


def test_what_does_not_fit_gets_a_chunk_of_its_own(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(step_memory, "_CHUNK", 4096)
    lender = Lender(memory := StepMemory())
    small, large, other = numbers(lender, 512), numbers(lender, 5000), numbers(lender, 256)
    assert [chunk.nbytes for chunk in memory.chunks] == [4096, 20000]
    assert other.data_ptr() == small.data_ptr() + 2048
    assert memory.num_bytes == 3072 + 20032
    for x, number in ((small, 1), (large, 2), (other, 3)):
        x.fill_(number)
    assert small.sum() == 512 and large.sum() == 10000 and other.sum() == 768


def test_a_lasting_tensor_holds_nothing() -> None:
    lender, outside = Lender(memory := StepMemory()), torch.ones(5)
    x = numbers(lender, 6, 4, dtype=torch.int32)
    x.copy_(torch.arange(24).view(6, 4))
    lasting = memory.lasting(x[1:, 2:])
    assert torch.equal(lasting, x[1:, 2:]) and lasting.stride() == (4, 1)
    assert memory.lasting(outside) is outside
    place = x.data_ptr()
    del x
    assert numbers(lender, 6, 4).data_ptr() == place
    memory.clear()
    assert not memory.num_bytes and lasting.shape == (5, 2)
