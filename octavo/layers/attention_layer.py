"""The attention layer: rotation, writing to the paged cache and attending, by the chosen backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from octavo.errors import ModelError
from octavo.kernels.reference_kv import FP8_LARGEST
from octavo.kv.format import KVFormat
from octavo.layers.attention import QKV, AttentionBackend, AttentionMetadata, PagedBackend
from octavo.layers.backends import backend_class
from octavo.layers.layer import BuildContext, Layer, LoadTarget, divide, sibling
from octavo.layers.linear import local_kv_heads
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding

FP8 = tuple(FP8_LARGEST)

# Beside an attention layer, the scales of keys and of values: first as compressed-tensors writes them, then
# by names that vLLM also reads: its own, ModelOpt's, and those of older compressed-tensors.
KV_SCALE_NAMES = (
    ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale"),
    ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale"),
)


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

    Attributes:
        kv_scale: of an FP8 cache float32 `[2, local KV heads]`, what the codes of keys and values are
            multiplied by; NaN until a checkpoint or `octavo.worker.kv_scales` fills it. None with every other
            cache.
        kv_centre: of a quantized cache float32 `[local KV heads, head_dim]`, what keys are stored less of: 0
            until `octavo.worker.kv_scales` fills it. None with every other cache, and under a softcap, which
            sees more of scores than their differences.
    """

    backend: AttentionBackend
    kv_scale: torch.Tensor | None
    kv_centre: torch.Tensor | None

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
        offset = build.kv_offset and build.kv_dtype == "int8"
        self.fmt = KVFormat(build.kv_dtype, build.block_size, kv_heads, self.head_dim, offset=offset)
        self.backend = self._make_backend(backend_class(build.attention_backend), heads, self.fmt)
        scale = centre = None
        if build.kv_dtype in FP8:  # filled by a checkpoint or by calibration; until then no number is right
            scale = torch.full((2, kv_heads), float("nan"), dtype=torch.float32, device=build.device)
        if self.fmt.quantized and self.softcap is None:
            centre = torch.zeros(kv_heads, self.head_dim, dtype=torch.float32, device=build.device)
        self.register_buffer("kv_scale", scale, persistent=False)
        self.register_buffer("kv_centre", centre, persistent=False)
        self.backend.kv_scale, self.backend.kv_centre = scale, centre
        self._first_kv_head = build.group.rank * self.num_kv_heads // build.group.size

    def _make_backend(self, kind: type[AttentionBackend], heads: int, fmt: KVFormat) -> AttentionBackend:
        softcap = () if self.softcap is None else (self.softcap,)
        return kind(heads, fmt, self.scale, self.sliding_window, *softcap)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        """The scales of keys and values, under the names that checkpoints have for them; where the cache is
        not FP8 they are passed over."""
        targets: dict[str, LoadTarget] = {}
        heads = self.num_kv_heads
        for part, part_names in enumerate(KV_SCALE_NAMES):
            first = sibling(prefix, part_names[0])
            for name in (sibling(prefix, name) for name in part_names):
                targets[name] = LoadTarget(
                    (),
                    partial(self._load_scale, name, (part,)),
                    optional=True,
                    covers=() if name == first else (first,),
                    other_shapes=((1,), (heads,), (heads, 1, 1)),
                )
        both = sibling(prefix, "kv_scale")
        covers = tuple(sibling(prefix, names[0]) for names in KV_SCALE_NAMES)
        load = partial(self._load_scale, both, (0, 1))
        return targets | {both: LoadTarget((), load, optional=True, covers=covers, other_shapes=((1,),))}

    def _load_scale(self, name: str, parts: tuple[int, ...], tensor: torch.Tensor) -> None:
        if self.kv_scale is None:
            return
        scale = tensor.flatten().float()
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            bad = scale[~(torch.isfinite(scale) & (scale > 0))][0]
            raise ModelError(
                f"weights: {name} holds {float(bad):g}, which is no scale: use another kv_cache_dtype than "
                f"{self.fmt.dtype}, or fetch the model again"
            )
        if len(scale) > 1:
            scale = scale[self._first_kv_head : self._first_kv_head + self.fmt.num_kv_heads]
        for part in parts:
            self.kv_scale[part].copy_(scale)

    @contextmanager
    def unquantized(self, dtype: str) -> Iterator[None]:
        """While it lasts, the layer's cache is of `dtype`, a float type's name."""
        before = self.fmt, self.backend
        self.fmt = replace(self.fmt, dtype=dtype, offset=False)
        self.backend = self._make_backend(type(self.backend), self.backend.num_heads, self.fmt)
        try:
            yield
        finally:
            self.fmt, self.backend = before

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
            cache: this layer's, of `fmt`'s shape.
            meta: the step's batch, one entry per KV group.

        Returns:
            `[rows, local heads * head_dim]`.
        """
        rotary, q_norm, k_norm = self._uses
        if q_norm is None or k_norm is None:
            qkv = QKV(q, k, v, rotary.cos_sin, positions)
        else:
            qkv = QKV(q, k, v, rotary.cos_sin, positions, q_norm.weight, k_norm.weight, q_norm.eps)
        return self.backend.rotate_and_attend(qkv, cache, meta[self.kv_group]).flatten(1)
