"""The attention layer: rotation, writing to the paged cache and attending, by the chosen backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.kv.format import KVFormat
from octavo.layers.attention import AttentionBackend, AttentionMetadata, PagedBackend
from octavo.layers.backends import backend_class
from octavo.layers.layer import BuildContext, Layer, divide
from octavo.layers.linear import local_kv_heads
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding


class CachedLayer(Layer):
    """A layer with a KV cache of its own.

    Attributes:
        fmt: format of this rank's part of the cache.
        sliding_window: tokens that a row sees, itself included; None: all before it.
        kv_group: index of the layer's KV group, and of its entry in the step's metadata.
        backend: what plans and computes its attention.
    """

    fmt: KVFormat
    sliding_window: int | None = None
    kv_group: int = 0
    backend: PagedBackend


class Attention(CachedLayer):
    """Causal grouped-query attention over the paged cache, split over ranks by heads.

    Args:
        num_heads, num_kv_heads, head_dim: of the whole layer, all ranks together.
        rotary: the model's table of positions.
        q_norm, k_norm: norms of each head before the rotation (Qwen3), both or neither.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None: all.
        scale: factor of the scores; None is `head_dim ** -0.5`.
        softcap: bound that a smooth tanh puts on the scores (Gemma 2); None: none.
    """

    backend: AttentionBackend

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sliding_window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.sliding_window = sliding_window
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        # In a tuple, so that these modules keep the names that their owners give them.
        self._uses = (rotary, q_norm, k_norm)

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        heads = divide(self.num_heads, build.group, "num_attention_heads")
        kv_heads = local_kv_heads(self.num_kv_heads, build.group)
        self.fmt = KVFormat(build.kv_dtype, build.block_size, kv_heads, self.head_dim)
        backend = backend_class(build.attention_backend)
        softcap = () if self.softcap is None else (self.softcap,)
        self.backend = backend(heads, self.fmt, self.scale, self.sliding_window, *softcap)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """Rotate, store and attend.

        Args:
            q: `[rows, local heads, head_dim]`; overwritten, like `k`.
            k, v: `[rows, local KV heads, head_dim]`.
            positions: int64 `[rows]`.
            cache: this layer's, `[num_blocks, 2, local KV heads, block_size, head_dim]`.
            meta: the step's batch, one entry per KV group.

        Returns:
            `[rows, local heads * head_dim]`.
        """
        rotary, q_norm, k_norm = self._uses
        batch = meta[self.kv_group]
        if q_norm is None or k_norm is None:
            q = self.backend.rotary_and_write_kv(q, k, v, rotary.cos_sin, positions, cache, batch)
        else:
            q = self.backend.rotary_and_write_kv(
                q, k, v, rotary.cos_sin, positions, cache, batch, q_norm.weight, k_norm.weight, q_norm.eps
            )
        return self.backend.attend(q, cache, batch).flatten(1)
