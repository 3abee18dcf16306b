"""Groups of ranks that are processes: torch.distributed over gloo (CPU) or NCCL (GPUs)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from octavo.errors import ConfigError
from octavo.parallel.state import TensorParallelGroup

LOOPBACK = "lo"


class DistributedGroup(TensorParallelGroup):
    """One rank of the processes that share each layer.

    Results are the same on all ranks to the bit: a part of a sum is added up in one place.

    Args:
        rank, size: of this group.
        group: torch.distributed's.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup):
        super().__init__(rank, size)
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not x.numel():
            return x
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

    world: TensorParallelGroup
    tensor: TensorParallelGroup
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
    size = tensor * pipeline
    # Nothing leaves this machine, and nobody else may come in.
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(
        backend,
        store=dist.FileStore(rendezvous, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=None if device.type == "cpu" else device,
    )
    world = dist.group.WORLD
    assert world is not None
    # Every rank makes every group, in the same order.
    stages = [
        world if pipeline == 1 else dist.new_group([s * tensor + r for r in range(tensor)])
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
