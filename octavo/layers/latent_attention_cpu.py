"""Latent attention on the CPU: the C++ kernels over the paged cache, or plain PyTorch where they can't be."""

from __future__ import annotations

import logging

import torch

from octavo.kernels.cpu import latent, ops
from octavo.kv.format import KVFormat
from octavo.layers.attention import AttentionMetadata
from octavo.layers.latent_attention import LatentBackend, TorchLatentAttention

logger = logging.getLogger(__name__)

_announced: set[str] = set()


class CPULatentAttention(LatentBackend):
    """Latent attention by `octavo.kernels.cpu.latent`, for float32 and bfloat16.

    Where the kernels cannot serve (not built, float16, odd sizes), the plain PyTorch backend does, and the
    log says why, once. `plan` prepares the step's arguments for all layers; `attend` does it itself on
    metadata that was not planned.
    """

    name = "cpu"

    def __init__(self, num_heads: int, fmt: KVFormat, kv_rank: int, scale: float):
        super().__init__(num_heads, fmt, kv_rank, scale)
        self._plain: TorchLatentAttention | None = None
        if reason := self._problem():
            self._plain = TorchLatentAttention(num_heads, fmt, kv_rank, scale)
            if reason not in _announced:
                _announced.add(reason)
                logger.warning("Latent attention by plain PyTorch (slow): %s", reason)
        # Constants of the layer, by the activations' dtype.
        self._shapes: dict[torch.dtype, latent.LatentShape] = {}

    def _problem(self) -> str:
        fmt = self.fmt
        if fmt.dtype not in ("float32", "bfloat16"):
            return f"the CPU kernels read float32 and bfloat16 caches, not {fmt.dtype}"
        problem = latent.latent_problem(self.kv_rank, fmt.head_dim - self.kv_rank, fmt.block_size)
        return problem or ops.why_not()

    def _shape(self, activations: torch.Tensor, cache: torch.Tensor) -> latent.LatentShape:
        shape = self._shapes.get(activations.dtype)
        if shape is None:
            shape = latent.latent_shape(self.num_heads, self.kv_rank, cache, self.scale, activations)
            self._shapes[activations.dtype] = shape
        return shape

    def plan(self, meta: AttentionMetadata) -> None:
        if self._plain is None:
            meta.plan = ops.attention_batch(meta.query_start, meta.seq_lens, meta.block_table)

    def rotate_and_write(
        self,
        q_pe: torch.Tensor,
        q_out: torch.Tensor,
        kv: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> None:
        if self._plain is not None:
            self._plain.rotate_and_write(q_pe, q_out, kv, weight, eps, cos_sin, positions, cache, meta)
            return
        shape, slots = self._shape(q_pe, cache), meta.slot_mapping
        latent.write(shape, q_pe, q_out, kv, weight, eps, cos_sin, positions, cache, slots)

    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        if self._plain is not None:
            return self._plain.attend(q, cache, meta)
        if not isinstance(meta.plan, ops.AttentionBatch):
            self.plan(meta)
        batch = meta.plan
        assert isinstance(batch, ops.AttentionBatch)
        out = q.new_empty(*q.shape[:2], self.kv_rank)
        latent.attend(self._shape(q, cache), batch, q, cache, out)
        return out
