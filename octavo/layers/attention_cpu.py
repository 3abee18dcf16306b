"""Attention on the CPU: the C++ kernels over the paged cache, or plain PyTorch where they can't be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from octavo.kernels.cpu import norm_act, ops
from octavo.layers.attention import QKV, AttentionBackend, AttentionMetadata, TorchAttention

if TYPE_CHECKING:
    from octavo.kv.format import KVFormat

logger = logging.getLogger(__name__)

_announced: set[str] = set()
_NO_FLOAT16 = "the CPU kernels compute in float32 and bfloat16, not float16"


class CPUAttention(AttentionBackend):
    """Paged attention by `octavo.kernels.cpu`: float32 and bfloat16 over caches of these or of 8 bits.

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
        self._cache_type = f"{fmt.dtype}_offset" if fmt.offset else fmt.dtype
        self._plain: TorchAttention | None = None
        if reason := self._problem():
            self._give_way(reason)
        # Constants of the layer, by the activations' dtype.
        self._shapes: dict[torch.dtype, ops.AttentionShape] = {}

    def _problem(self) -> str:
        """Why the kernels cannot serve, whatever the activations; empty: they can."""
        fmt = self.fmt
        if fmt.dtype == "float16":
            return _NO_FLOAT16
        problem = ops.attention_problem(self.num_heads, fmt.num_kv_heads, fmt.head_dim, fmt.block_size)
        return problem or ops.why_not()

    def _give_way(self, reason: str) -> None:
        self._plain = TorchAttention(self.num_heads, self.fmt, self.scale, self.sliding_window, self.softcap)
        if reason not in _announced:
            _announced.add(reason)
            logger.warning("Attention by plain PyTorch (slow): %s", reason)

    def _instead(self, x: torch.Tensor) -> TorchAttention | None:
        """What serves activations like `x` where the kernels cannot."""
        if self._plain is None and x.dtype is torch.float16:  # over a cache of another type
            self._give_way(_NO_FLOAT16)
        if self._plain is not None:
            self._plain.kv_scale, self._plain.kv_centre = self.kv_scale, self.kv_centre
        return self._plain

    def plan(self, meta: AttentionMetadata) -> None:
        if self._plain is None:
            meta.plan = ops.attention_batch(meta.query_start, meta.seq_lens, meta.block_table)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        if (plain := self._instead(k)) is not None:
            plain.write_kv(k, v, cache, meta)
        else:
            scale, centre = self.kv_scale, self.kv_centre
            ops.write_kv(k, v, cache, meta.slot_mapping, self._cache_type, scale, centre)

    def rotary_and_write_kv(self, qkv: QKV, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        if (plain := self._instead(qkv.k)) is not None:
            return plain.rotary_and_write_kv(qkv, cache, meta)
        q, k, v, cos_sin, positions, q_weight, k_weight, eps = qkv
        if q_weight is not None and k_weight is not None:
            q, k = norm_act.rms_norm(q, q_weight, eps), norm_act.rms_norm(k, k_weight, eps)
        slots, kind = meta.slot_mapping, self._cache_type
        ops.rope_and_write_kv(
            q, k, v, cos_sin, positions, cache, slots, kind, self.kv_scale, self.kv_centre
        )  # fmt: skip
        return q

    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        if (plain := self._instead(q)) is not None:
            return plain.attend(q, cache, meta)
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
                self._cache_type,
                self.softcap,
            )
        out = torch.empty_like(q)
        ops.attend(shape, batch, q, cache, out, self.kv_scale)
        return out
