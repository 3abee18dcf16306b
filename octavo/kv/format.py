"""What one block of KV cache looks like in memory, stated once for ledger, pool, tiers and transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVFormat:
    """Layout of one layer's KV block: `[parts, num_kv_heads, block_size, head_dim]`, contiguous.

    Parts are K and V, or with `latent` the one vector per token that both are made of (DeepSeek's
    latent attention; one head, its size the compressed KV's and the rotated key's together). A layer's
    cache is `[num_blocks, parts, num_kv_heads, block_size, head_dim]`, so that one block of one layer is
    one contiguous piece (cheap to copy or send) and one head's keys within it too (cheap to stream).
    """

    dtype: str
    block_size: int
    num_kv_heads: int
    head_dim: int
    latent: bool = False

    def layer_block_shape(self) -> tuple[int, int, int, int]:
        """Shape of one block of one layer."""
        return (1 if self.latent else 2, self.num_kv_heads, self.block_size, self.head_dim)

    def layer_block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return math.prod(self.layer_block_shape()) * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """Text that enters the root of the block keys: equal text means interchangeable bytes."""
        kind = ":latent" if self.latent else ""
        return f"{self.dtype}:block{self.block_size}:heads{self.num_kv_heads}:dim{self.head_dim}{kind}:KHTD"


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table (all full attention, all sliding window of one size, …)."""

    name: str
    layers: tuple[int, ...]
    format: KVFormat
    sliding_window: int | None = None

    def block_bytes(self) -> int:
        """Bytes that one block id of this group stands for, all its layers together."""
        return len(self.layers) * self.format.layer_block_bytes()
