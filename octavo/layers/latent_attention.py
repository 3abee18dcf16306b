"""Multi-head latent attention (MLA) in its absorbed form: DeepSeek-V2, arXiv 2405.04434, section 2.1.

Keys and values of all heads are linear maps of one compressed vector per token, so the maps are applied
to the queries and to the results instead, and only the vector is cached and read: multi-query attention
in the latent space. Backends read the same paged cache and metadata as ordinary attention's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from octavo.errors import ConfigError
from octavo.kernels import reference_latent
from octavo.kv.format import QUANTIZED, KVFormat
from octavo.layers.attention import AttentionMetadata, PagedBackend
from octavo.layers.attention_layer import CachedLayer
from octavo.layers.backends import load_class
from octavo.layers.latent_attention_linear import LatentUpProjection
from octavo.layers.layer import BuildContext, divide
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.config import LatentConfig


class LatentBackend(PagedBackend):
    """How latent attention over the paged cache is computed on one kind of device.

    The cache of a layer is `[num_blocks, 1, 1, block_size, kv_rank + rope_dim]` (`KVFormat.latent`). A
    backend holds no per-request state: everything it reads is in the metadata.

    Args:
        num_heads: of this rank.
        fmt: format of the cache.
        kv_rank: elements of the compressed KV; the rest of a vector is the rotated key's.
        scale: factor of the scores.
    """

    def __init__(self, num_heads: int, fmt: KVFormat, kv_rank: int, scale: float):
        self.num_heads = num_heads
        self.fmt = fmt
        self.kv_rank = kv_rank
        self.scale = scale

    @abstractmethod
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
        """Rotate the queries' rotary parts, and store the rows' latent vectors at `meta.slot_mapping`; see
        `octavo.kernels.reference_latent.rotate_and_write_latent`."""

    @abstractmethod
    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Causal attention of rows `q` (`[rows, num_heads, kv_rank + rope_dim]`) over their contexts, whose
        vectors are in the cache, this step's included. Returns `[rows, num_heads, kv_rank]`."""


class TorchLatentAttention(LatentBackend):
    """Plain PyTorch, one request after the other, in float32: the oracle of the other backends' tests."""

    name = "torch"

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
        reference_latent.rotate_and_write_latent(
            q_pe, q_out, kv, weight, eps, cos_sin, positions, cache, meta.slot_mapping
        )

    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], self.kv_rank)
        return reference_latent.latent_attention(
            q, cache, meta.query_start, meta.seq_lens, meta.block_table, self.kv_rank, self.scale, out
        )


# By the names of `octavo.layers.backends.BACKENDS`: module and class.
BACKENDS = {
    "torch": (__name__, "TorchLatentAttention"),
    "cpu": ("octavo.layers.latent_attention_cpu", "CPULatentAttention"),
    "triton": ("octavo.layers.latent_attention_triton", "TritonLatentAttention"),
}


def latent_backend_class(name: str) -> type[LatentBackend]:
    """The latent counterpart of an attention backend.

    Raises:
        ConfigError: it has none, or its library is not installed.
    """
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend={name!r} has no latent attention: use auto or one of {', '.join(BACKENDS)}"
        )
    return load_class(name, *BACKENDS[name])


class LatentAttention(CachedLayer):
    """Causal multi-head latent attention over the paged cache, split over ranks by heads.

    Every rank caches the whole latent vectors.

    Args:
        num_heads: of the whole layer, all ranks together.
        latent: sizes.
        rotary: the model's table of positions.
        kv_norm: of the compressed KV.
        up: the projection to keys and values; see `LatentUpProjection`.
        scale: factor of the scores.
    """

    backend: LatentBackend

    def __init__(
        self,
        num_heads: int,
        latent: LatentConfig,
        rotary: RotaryEmbedding,
        kv_norm: RMSNorm,
        up: LatentUpProjection,
        scale: float,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.latent = latent
        self.scale = scale
        # In a tuple, so that these modules keep the names that their owners give them.
        self._uses = (rotary, kv_norm, up)

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        if build.kv_dtype in QUANTIZED:
            raise ConfigError(
                f"kv_cache_dtype={build.kv_dtype!r} does not serve latent attention, whose cache is "
                "compressed already: leave it auto"
            )
        heads = divide(self.num_heads, build.group, "num_attention_heads")
        size = self.latent.kv_rank + self.latent.rope_dim
        self.fmt = KVFormat(build.kv_dtype, build.block_size, 1, size, latent=True)
        backend = latent_backend_class(build.attention_backend)
        self.backend = backend(heads, self.fmt, self.latent.kv_rank, self.scale)

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """Absorb, rotate, store, attend and expand.

        Args:
            q: `[rows, local heads * (nope_dim + rope_dim)]`.
            kv: `[rows, kv_rank + rope_dim]`, compressed KV before its norm, then the shared key's part.
            positions: int64 `[rows]`.
            cache: this layer's, `[num_blocks, 1, 1, block_size, kv_rank + rope_dim]`.
            meta: the step's batch, one entry per KV group.

        Returns:
            `[rows, local heads * value_dim]`.
        """
        rotary, norm, up = self._uses
        sizes, batch = self.latent, meta[self.kv_group]
        q_nope, q_pe = q.unflatten(1, (-1, sizes.nope_dim + sizes.rope_dim)).split(
            [sizes.nope_dim, sizes.rope_dim], dim=-1
        )
        query = q.new_empty(*q_nope.shape[:2], sizes.kv_rank + sizes.rope_dim)
        q_latent, q_rotated = query.split([sizes.kv_rank, sizes.rope_dim], dim=-1)
        up.absorb(q_nope, q_latent)
        self.backend.rotate_and_write(
            q_pe, q_rotated, kv, norm.weight, norm.eps, rotary.cos_sin, positions, cache, batch
        )
        return up.expand(self.backend.attend(query, cache, batch))
