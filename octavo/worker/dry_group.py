"""Tensor-parallel ranks of which there is only one: to find out which kernels real ones will launch."""

from __future__ import annotations

import torch

from octavo.kernels.triton import peers
from octavo.parallel.state import TensorParallelGroup

_ROWS, _ROW_BYTES = {2: 512}, 16384  # of the boxes of `octavo.parallel.peer_memory`


class DryGroup(TensorParallelGroup):
    """The first of several ranks, for a worker on a pretended GPU, where only shapes are computed. Sums
    are launched as every rank launches them, since each has kernels of its own.

    Args:
        size: of the group.
        device: the pretended one.
        use_peers: whether sums go over peer memory; else they are NCCL's, which has no kernels to compile.
    """

    def __init__(self, size: int, device: torch.device, use_peers: bool):
        super().__init__(0, size)
        self._boxes: dict[int, list[peers.PeerBox]] = {}
        for dtype in (torch.int16, torch.int32) if use_peers else ():
            shape = (2, size, _ROWS.get(size, 128), _ROW_BYTES // dtype.itemsize)
            self._boxes[dtype.itemsize] = [
                peers.PeerBox(
                    rank,
                    size,
                    torch.empty(shape, dtype=dtype, device=device),
                    torch.empty(size, dtype=torch.int64, device=device),
                    torch.empty(shape[2], dtype=torch.int32, device=device),
                )
                for rank in range(size)
            ]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        for box in self._boxes_for(x):
            peers.sum_over_ranks(x, box)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = None
        for box in self._boxes_for(x):
            found = peers.sum_add_rms_norm(x, residual, weight, eps, box)
        return super().add_rms_norm(x, residual, weight, eps) if found is None else found

    def argmax(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        if not self._boxes:
            return super().argmax(logits, first)
        values, indices = peers.largest_in_parts(logits)
        tokens = [peers.best_over_ranks(values, indices, first, box) for box in self._boxes[4]]
        return tokens[0]

    def minimum(self, value: int) -> int:
        return value

    def _boxes_for(self, x: torch.Tensor) -> list[peers.PeerBox]:
        boxes = self._boxes.get(x.element_size(), []) if x.dim() == 2 else []
        return boxes if boxes and x.shape[1] <= boxes[0].row_words else []
