"""Blocks with random contents, and what every `BlockCopier` must do with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from octavo.kernels.block_copy import BlockCopier

# (layers, bytes of a piece, blocks of the device, slots of the host, blocks copied)
SHAPES = [(1, 8, 3, 2, 2), (3, 24, 9, 5, 4), (2, 4096, 5, 9, 5), (5, 16400, 4, 4, 3), (2, 65536, 3, 3, 2)]
Make = Callable[[list[torch.Tensor], torch.Tensor], BlockCopier]


def check(
    make: Make,
    shape: tuple[int, int, int, int, int],
    device: str = "cpu",
    finish: Callable[[], None] = lambda: None,
    pin: Callable[[torch.Tensor], torch.Tensor] = lambda host: host,
) -> None:
    """Copies some blocks out and some in: those arrive, and nothing else changes."""
    layers, piece, num_blocks, num_slots, count = shape
    rng = np.random.default_rng(sum(shape))
    generator = torch.Generator().manual_seed(sum(shape))

    def random(*sizes: int) -> torch.Tensor:
        return torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8)

    before = [random(num_blocks, piece) for _ in range(layers)]
    buffers = [b.to(device, copy=True) for b in before]
    kept = random(num_slots, layers, piece)
    host = pin(kept.clone())
    copier = make(buffers, host)
    blocks = rng.permutation(num_blocks)[:count].astype(np.int32)
    slots = rng.permutation(num_slots)[:count].astype(np.int32)
    copier.out(blocks, slots)
    finish()
    expected = kept.clone()
    expected[torch.from_numpy(slots).long()] = torch.stack(
        [b[torch.from_numpy(blocks).long()] for b in before], 1
    )
    assert torch.equal(host, expected)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(buffers, before, strict=True))
    host.copy_(random(num_slots, layers, piece))
    expected = host.clone()
    targets = rng.permutation(num_blocks)[:count].astype(np.int32)
    copier.into(slots, targets)
    finish()
    assert torch.equal(host, expected)
    for j, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
        wanted = old.clone()
        wanted[torch.from_numpy(targets).long()] = expected[torch.from_numpy(slots).long(), j]
        assert torch.equal(buffer.cpu(), wanted)
