"""Which tensor-parallel rank this process is, and the collectives that layers need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from octavo.kernels import ops


class TensorParallelGroup:
    """The ranks that share each layer's weights: this rank, their number, and how they add up.

    This class is the plain case, one rank: every collective is the identity. A group of several
    ranks overrides the collectives.
    """

    transport = ""  # how parts of a sum get to other ranks, for the log

    def __init__(self, rank: int = 0, size: int = 1):
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not among {size} ranks")
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`; may overwrite it."""
        self._alone("all_reduce")
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, joined along the last dimension in the order of ranks."""
        self._alone("all_gather")
        return x

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`ops.add_rms_norm` of the sum of every rank's `x`, which may be overwritten."""
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def argmax(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Index of each row's largest logit among all ranks' columns; of equals the lowest index.

        Args:
            logits: this rank's columns, `[rows, columns]`, at least one.
            first: the number of its first column among all, below 2^24.

        Returns:
            Integers `[rows]`, the same on every rank.
        """
        index = ops.argmax(logits)
        if self.size == 1:
            return index + first if first else index
        value = logits.gather(1, index[:, None]).float()
        # float32 holds such an index exactly.
        pairs = self.all_gather(torch.cat((value, (index[:, None] + first).float()), dim=1))
        values, indices = pairs.view(len(logits), self.size, 2).unbind(-1)
        best = ops.argmax(values.contiguous())
        return indices.gather(1, best[:, None]).squeeze(1).to(torch.int64)

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' numbers: for what all have to agree on (not within a step)."""
        self._alone("minimum")
        return value

    def _alone(self, what: str) -> None:
        if self.size > 1:
            raise NotImplementedError(f"{what} over {self.size} ranks needs a group with a transport")


_SINGLE = TensorParallelGroup()
_current: ContextVar[TensorParallelGroup] = ContextVar("tensor_parallel_group", default=_SINGLE)


def tensor_parallel_group() -> TensorParallelGroup:
    """The group that layers built now belong to: one rank unless `use_group` says otherwise."""
    return _current.get()


@contextmanager
def use_group(group: TensorParallelGroup) -> Iterator[None]:
    """Build layers for `group` inside the block. A layer keeps the group that it was built for."""
    token = _current.set(group)
    try:
        yield
    finally:
        _current.reset(token)
