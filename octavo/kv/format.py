"""What one block of KV cache looks like in memory, stated once for ledger, pool, tiers and transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Bytes of one stored number.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e5m2": 1, "int8": 1}
# Stored as bytes: numbers of 8 bits times a scale.
QUANTIZED = ("fp8", "fp8_e5m2", "int8")


@dataclass(frozen=True)
class KVFormat:
    """Layout of one layer's KV block: `[parts, num_kv_heads, block_size, head_dim]`, contiguous.

    Parts are K and V, or with `latent` the one vector per token that both are made of (DeepSeek's
    latent attention; one head, its size the compressed KV's and the rotated key's together). A layer's
    cache is `[num_blocks, parts, num_kv_heads, block_size, head_dim]`, so that one block of one layer is
    one contiguous piece (cheap to copy or send) and one head's keys within it too (cheap to stream).

    Quantized caches are uint8 tensors:

    * `fp8` (e4m3fn) and `fp8_e5m2` have the same shape; a number is its code's value times the scale of
      its layer, part and head, which the attention layer owns (`Attention.kv_scale`, `[2, heads]`).
    * `int8` carries one float16 scale per token, head and part, behind the codes of the same head:
      `[parts, num_kv_heads, block_size * (head_dim + 2)]`, a head's piece being its codes
      `[block_size, head_dim]` and then its scales `[block_size]`; with `offset`, float16 offsets
      `[block_size]` follow, and the last dimension is `block_size * (head_dim + 4)`. A number is
      `code * scale + offset`.

    `octavo.kernels.reference_kv` has both written down as code.
    """

    dtype: str
    block_size: int
    num_kv_heads: int
    head_dim: int
    latent: bool = False
    offset: bool = False

    @property
    def quantized(self) -> bool:
        """Whether numbers are stored in 8 bits."""
        return self.dtype in QUANTIZED

    @property
    def storage_dtype(self) -> str:
        """PyTorch's name of the cache tensor's dtype."""
        return "uint8" if self.quantized else self.dtype

    def layer_block_shape(self) -> tuple[int, ...]:
        """Shape of one block of one layer, in elements of `storage_dtype`."""
        parts = 1 if self.latent else 2
        if self.dtype == "int8":
            extra = 4 if self.offset else 2
            return (parts, self.num_kv_heads, self.block_size * (self.head_dim + extra))
        return (parts, self.num_kv_heads, self.block_size, self.head_dim)

    def layer_block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return math.prod(self.layer_block_shape()) * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """Text that enters the root of the block keys: equal text means interchangeable bytes."""
        kind = (":latent" if self.latent else "") + (":offset" if self.offset else "")
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
