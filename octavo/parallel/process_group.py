"""Groups of ranks that are processes: torch.distributed over gloo (CPU) or NCCL (GPUs)."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from octavo.errors import ConfigError
from octavo.parallel.peer_memory import PeerError, PeerMemory
from octavo.parallel.state import TensorParallelGroup

logger = logging.getLogger(__name__)

LOOPBACK = "lo"


class DistributedGroup(TensorParallelGroup):
    """One rank of the processes that share each layer.

    Results are the same on all ranks to the bit: a part of a sum is added up in one place, or in the same
    order everywhere.

    Args:
        rank, size: of this group.
        group: torch.distributed's.

    Attributes:
        transport: how parts of a sum get to the other ranks, for the log.
    """

    transport = "gloo"
    _peers: PeerMemory | None = None  # what few rows are added up through

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup):
        super().__init__(rank, size)
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not x.numel():
            return x
        if self._peers is not None and (box := self._peers.box_for(x)) is not None:
            return self._peers.kernels.sum_over_ranks(x, box)
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts, x.flatten(), group=self._group)
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._peers is not None and residual.stride(-1) == 1 and residual.dtype is x.dtype and len(x):
            if (box := self._peers.box_for(x)) is not None:
                kernels = self._peers.kernels
                return kernels.sum_add_rms_norm(x, residual, weight, eps, box)
        return super().add_rms_norm(x, residual, weight, eps)

    def argmax(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        if self._peers is None or not 0 < len(logits) <= self._peers.boxes[4].rows:
            return super().argmax(logits, first)
        kernels = self._peers.kernels
        values, indices = kernels.largest_in_parts(logits)
        return kernels.best_over_ranks(values, indices, first, self._peers.boxes[4])

    def join_peers(self, device: torch.device, few_rows: bool, any_rows: bool = False) -> None:
        """Settle how parts of sums get to the other ranks. Every rank of the group calls this at one point.

        Args:
            device: where they are.
            few_rows: on GPUs, add few rows up in memory that all ranks write, where that is possible.
            any_rows: and any number of them, so that the order of additions is that of ranks for all.

        Raises:
            ConfigError: it seemed possible, and does not work.
        """
        if self.size == 1 or device.type != "cuda":
            return
        self.transport = "NCCL"
        if not few_rows:
            return
        try:
            self._peers = PeerMemory(self.rank, self.size, device, self._gather_bytes, any_rows)
        except PeerError as error:
            logger.warning("sums over ranks go through NCCL alone: %s", error)
        else:
            rows = self._peers.rows
            self.transport = "peer memory" + (
                "" if rows == sys.maxsize else f" up to {rows} rows, NCCL beyond"
            )

    def _gather_bytes(self, own: bytes) -> list[bytes]:
        parts = [torch.empty(len(own), dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.frombuffer(bytearray(own), dtype=torch.uint8), group=self._group)
        return [part.numpy().tobytes() for part in parts]

    def minimum(self, value: int) -> int:
        if self.size == 1:
            return value
        number = torch.tensor([value], dtype=torch.int64)  # on the CPU, where gloo serves beside NCCL
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self._group)
        return int(number)


def choose_rank_device(name: str, rank: int, size: int) -> torch.device:
    """The device of a rank, which becomes this process's current one: each has a GPU of its own, all share
    the CPU.

    Args:
        name: the setting, without a number.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"{size} ranks need as many GPUs, and {torch.cuda.device_count()} are visible: lower "
            "tensor_parallel_size or pipeline_parallel_size, or use device='cpu'"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


@dataclass(frozen=True)
class Ranks:
    """Where one rank stands.

    Attributes:
        world: all ranks.
        tensor: those of its stage, which share each layer.
        stage: its stage.
    """

    world: DistributedGroup
    tensor: DistributedGroup
    stage: int = 0


def join_ranks(
    rank: int, tensor: int, pipeline: int, rendezvous: str, device: torch.device, seconds: float
) -> Ranks:
    """Meet the other ranks; every one of them calls this. Once per process.

    Args:
        rank: among all, stage * tensor + rank within the stage.
        tensor, pipeline: ranks of a stage, and stages.
        rendezvous: path of a file for this alone.
        device: on which the ranks' tensors will be.
        seconds: that a collective operation may take before it raises an error.

    Raises:
        RuntimeError: the others did not come in time.
    """
    size, timeout = tensor * pipeline, timedelta(seconds=seconds)
    # Nothing leaves this machine, and nobody else may come in.
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    # Pipeline stages send by groups of their own for each direction, whose operations may follow each other.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(
        backend,
        store=dist.FileStore(rendezvous, size),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    world = dist.group.WORLD
    assert world is not None
    # Every rank makes every group, in the same order.
    stages = [
        world if pipeline == 1 else dist.new_group([s * tensor + r for r in range(tensor)], timeout=timeout)
        for s in range(pipeline)
    ]
    stage = rank // tensor
    ranks = Ranks(
        DistributedGroup(rank, size, world), DistributedGroup(rank % tensor, tensor, stages[stage]), stage
    )
    # Connections are made at first use, by the rendezvous; and all must have come before anybody goes on.
    for group in {id(g): g for g in (ranks.world, ranks.tensor)}.values():
        group.minimum(0)
        group.all_reduce(torch.zeros(1, device=device))
    ranks.world.minimum(0)
    return ranks
