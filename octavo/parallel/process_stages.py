"""Pipeline stages that are processes: rows and tokens over torch.distributed (gloo on CPUs, NCCL on GPUs)."""

from __future__ import annotations

import collections
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from octavo.parallel.stages import StageGroup


class DistributedStages(StageGroup):
    """The stages of one replica, seen from the ranks of one place within their stages.

    Rows and tokens have a group each: operations of one group run one after the other on a GPU, and rows that
    wait for the next stage must not hold up tokens that it waits for.

    Args:
        stage: this one's number.
        ranks: one of each stage, in order, by their numbers among all.
        rows, tokens: groups of these.
    """

    def __init__(self, stage: int, ranks: list[int], rows: dist.ProcessGroup, tokens: dist.ProcessGroup):
        super().__init__(stage, len(ranks))
        self._ranks = ranks
        self._rows, self._tokens = rows, tokens
        self._sent: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()

    def send(self, x: torch.Tensor) -> None:
        self._send(x.clone(), self._ranks[self.stage + 1], self._rows)

    def receive(self, into: torch.Tensor) -> None:
        dist.recv(into, self._ranks[self.stage - 1], group=self._rows)

    def send_tokens(self, tokens: torch.Tensor) -> None:
        copy = tokens.to(torch.int32, copy=True).contiguous()
        for rank in self._ranks[:-1]:
            self._send(copy, rank, self._tokens)

    def receive_tokens(self, into: torch.Tensor) -> None:
        dist.recv(into, self._ranks[-1], group=self._tokens)

    def flush(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()

    def minimum(self, value: int) -> int:
        number = torch.tensor([value], dtype=torch.int64)  # on the CPU, where gloo serves beside NCCL
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self._rows)
        return int(number)

    def meet(self, device: torch.device) -> None:
        """Make the connections, which is done at first use; all stages call this at the same point."""
        self.minimum(0)
        one = torch.zeros(1, 1, dtype=torch.int32, device=device)
        dist.all_reduce(torch.zeros(1), group=self._tokens)
        if not self.is_first:
            self.receive(one)
        if not self.is_last:
            self.send(one)
            self.receive_tokens(one)
        else:
            self.send_tokens(one)
        self.minimum(0)

    def _send(self, own: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
        """Begin to send memory that nobody else writes."""
        self._sent.append((dist.isend(own, rank, group=group), own))
        # With a step in each stage, what was sent so long ago has been received: this waits for nothing.
        while len(self._sent) > 2 * self.size * self.size:
            self._sent.popleft()[0].wait()


def join_stages(rank: int, tensor: int, pipeline: int, device: torch.device, seconds: float) -> StageGroup:
    """The pipeline stages, once all ranks have met (`join_ranks`); every one of them calls this.

    Args:
        rank: among all, stage * tensor + rank within the stage.
        tensor, pipeline: ranks of a stage, and stages.
        device: on which rows and tokens will be.
        seconds: that an operation may take before it raises an error.
    """
    if pipeline == 1:
        return StageGroup()
    found: DistributedStages | None = None
    timeout = timedelta(seconds=seconds)
    for place in range(tensor):  # every rank makes every group, in the same order
        ranks = [stage * tensor + place for stage in range(pipeline)]
        rows, tokens = (dist.new_group(ranks, timeout=timeout) for _ in range(2))
        if rank % tensor == place:
            found = DistributedStages(rank // tensor, ranks, rows, tokens)
    assert found is not None
    found.meet(device)
    return found
