"""Attention on the CPU: the C++ kernels over the paged cache, or plain PyTorch where they can't be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from octavo.kernels.cpu import norm_act, ops
from octavo.layers.attention import AttentionBackend, AttentionMetadata, TorchAttention

if TYPE_CHECKING:
    from octavo.kv.format import KVFormat

logger = logging.getLogger(__name__)

_announced: set[str] = set()


class CPUAttention(AttentionBackend):
    """Paged attention by `octavo.kernels.cpu`, for float32 and bfloat16.

    Where the kernels cannot serve (not built, float16, a head size that is no multiple of 4), the
    plain PyTorch backend does, and the log says why, once. `plan` prepares the step's arguments for
    all layers; `attend` does it itself on metadata that was not planned.
    """

    name = "cpu"

    def __init__(
        self,
        num_heads: int,
        fmt: KVFormat,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ):
        super().__init__(num_heads, fmt, scale, sliding_window, softcap)
        self._cache_dtype = getattr(torch, fmt.dtype)
        self._plain: TorchAttention | None = None
        reason = self._problem()  # empty: the kernels serve
        if reason:
            self._plain = TorchAttention(num_heads, fmt, scale, sliding_window, softcap)
            if reason not in _announced:
                _announced.add(reason)
                logger.warning("Attention by plain PyTorch (slow): %s", reason)
        # Constants of the layer, by the activations' dtype.
        self._shapes: dict[torch.dtype, ops.AttentionShape] = {}

    def _problem(self) -> str:
        if self._cache_dtype not in (torch.float32, torch.bfloat16):
            return f"the CPU kernels read float32 and bfloat16 caches, not {self.fmt.dtype}"
        fmt = self.fmt
        problem = ops.attention_problem(self.num_heads, fmt.num_kv_heads, fmt.head_dim, fmt.block_size)
        return problem or ops.why_not()

    def plan(self, meta: AttentionMetadata) -> None:
        if self._plain is None:
            meta.plan = ops.attention_batch(meta.query_start, meta.seq_lens, meta.block_table)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        if self._plain is not None:
            self._plain.write_kv(k, v, cache, meta)
        else:
            ops.write_kv(k, v, cache, meta.slot_mapping)

    def rotary_and_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        if self._plain is not None:
            return self._plain.rotary_and_write_kv(
                q, k, v, cos_sin, positions, cache, meta, q_weight, k_weight, eps
            )
        if q_weight is not None and k_weight is not None:
            q, k = norm_act.rms_norm(q, q_weight, eps), norm_act.rms_norm(k, k_weight, eps)
        ops.rope_and_write_kv(q, k, v, cos_sin, positions, cache, meta.slot_mapping)
        return q

    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        if self._plain is not None:
            return self._plain.attend(q, cache, meta)
        batch = meta.plan
        if not isinstance(batch, ops.AttentionBatch):
            self.plan(meta)
            batch = meta.plan
            assert isinstance(batch, ops.AttentionBatch)
        shape = self._shapes.get(q.dtype)
        if shape is None:
            fmt = self.fmt
            shape = self._shapes[q.dtype] = ops.attention_shape(
                self.num_heads,
                fmt.num_kv_heads,
                fmt.head_dim,
                fmt.block_size,
                self.scale,
                self.sliding_window,
                q.dtype,
                self._cache_dtype,
                self.softcap,
            )
        out = torch.empty_like(q)
        ops.attend(shape, batch, q, cache, out)
        return out
