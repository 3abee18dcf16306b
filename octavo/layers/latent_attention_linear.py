"""The projections of multi-head latent attention (MLA, arXiv 2405.04434), with what it asks of their rows.

DeepSeek's rotary embedding turns neighbouring elements together (2i with 2i + 1), the kernels here turn
element i with i + rope_dim / 2. Both give the same scores if the rows that make the elements are put in
the kernels' order, in the queries and in the key alike; that is done once, while loading.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from octavo.layers.layer import BuildContext, Layer, LoadTarget, divide, matrix_targets, sibling
from octavo.layers.linear import ColumnParallelLinear, ReplicatedLinear
from octavo.models.config import LatentConfig
from octavo.quantization.linear_method import LinearMethod, MatrixPart, Shard, cpu_lacks
from octavo.quantization.shard import Region


def half_rotation_order(heads: int, head_dim: int, rope_dim: int) -> torch.Tensor:
    """For heads whose last `rope_dim` rows turn in neighbouring pairs: the rows, int64
    `[heads * head_dim]`, in the order in which each pair's members lie `rope_dim / 2` apart."""
    head = torch.arange(head_dim)
    first = head_dim - rope_dim
    head[first:] = first + torch.arange(rope_dim).view(-1, 2).T.flatten()
    return (torch.arange(heads)[:, None] * head_dim + head).flatten()


class LatentQueryLinear(ColumnParallelLinear):
    """The projection to queries, split by heads of `[nope_dim, rope_dim]`: `[rows, in_features]` to
    `[rows, local heads * (nope_dim + rope_dim)]`.

    Args:
        interleaved: whether the checkpoint's rotary pairs are neighbours.
    """

    def __init__(self, in_features: int, heads: int, latent: LatentConfig, interleaved: bool):
        head_dim = latent.nope_dim + latent.rope_dim
        super().__init__(in_features, heads * head_dim)
        self._order = half_rotation_order(heads, head_dim, latent.rope_dim) if interleaved else None

    def row_order(self, part: str) -> torch.Tensor | None:
        return self._order


class LatentDownLinear(ReplicatedLinear):
    """The projections to compressed queries (where they are compressed) and compressed KV with the shared
    part of the key, as one matrix that every rank holds: the latter are the last `kv_rank + rope_dim`
    elements of `[rows, …]`.
    """

    def __init__(self, hidden_size: int, latent: LatentConfig, bias: bool, interleaved: bool):
        size = latent.kv_rank + latent.rope_dim
        super().__init__(hidden_size, size, bias)
        query = {} if latent.q_rank is None else {"q_a_proj": latent.q_rank}
        self.parts = {**query, "kv_a_proj_with_mqa": size}
        self._order = half_rotation_order(1, size, latent.rope_dim) if interleaved else None

    def row_order(self, part: str) -> torch.Tensor | None:
        return self._order if part == "kv_a_proj_with_mqa" else None


class LatentUpProjection(Layer):
    """The projection from compressed KV to every head's keys and values, taken apart into what the absorbed
    form multiplies with: W_UK, `[local heads, nope_dim, kv_rank]`, and W_UV, `[local heads, value_dim,
    kv_rank]`.

    The linear method stores and loads `kv_b_proj` as it does any matrix; once loaded it is multiplied
    with the unit matrix, which gives it back in the activations' dtype whatever the format, and dropped.
    A checkpoint may also hold each head's two parts by themselves (llama.cpp's newer GGUF files):
    `k_b_proj`, `[heads, kv_rank, nope_dim]`, and `v_b_proj`, `[heads, value_dim, kv_rank]`.
    """

    method: LinearMethod
    w_uk: torch.Tensor
    w_uv: torch.Tensor

    def __init__(self, heads: int, latent: LatentConfig):
        super().__init__()
        self.heads = heads
        self.latent = latent
        self._stored: nn.Module | None = None

    @property
    def _head_dim(self) -> int:
        return self.latent.nope_dim + self.latent.value_dim

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.local_heads = divide(self.heads, build.group, "num_attention_heads")
        self.first_head = build.group.rank * self.local_heads
        self.method = build.linear_method(prefix)
        self.dtype, self.device = build.dtype, build.device
        self._stored = nn.Module()
        rows = self.local_heads * self._head_dim
        self.method.create_weights(self._stored, rows, self.latent.kv_rank, build.dtype, build.device)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        head_dim, rank = self._head_dim, self.latent.kv_rank
        rows = self.heads * head_dim
        shard = Shard(0, self.first_head * head_dim, self.local_heads * head_dim, 0, rank)
        part = self.method.part(prefix, rows, rank)
        targets = matrix_targets(prefix, part, partial(self._load_part, part, shard), [shard])
        if len(targets) == 1:  # a format that keeps scales beside the weight has them for kv_b_proj alone
            nope, value = self.latent.nope_dim, self.latent.value_dim
            ((whole, target),) = targets.items()
            keys, values = (f"{sibling(prefix, name)}.weight" for name in ("k_b_proj", "v_b_proj"))
            targets[whole] = replace(target, covers=(keys, values))
            for name, shape, load in (
                (keys, (rank, nope), self._load_keys),
                (values, (value, rank), self._load_values),
            ):
                mine = Region(shape, (0, 0), shape).of_stack(self.heads, self.first_head, self.local_heads)
                targets[name] = LoadTarget((self.heads, *shape), load, regions=(mine,))
        return targets

    def _load_part(self, part: MatrixPart, shard: Shard, name: str, tensor: torch.Tensor) -> None:
        assert self._stored is not None
        part.load_shard(self._stored, name, tensor, shard)

    def _load(self, name: str, shard: Shard, tensor: torch.Tensor) -> None:
        assert self._stored is not None
        self.method.load_shard(self._stored, name, tensor, shard)

    def _load_keys(self, tensor: torch.Tensor) -> None:
        self._load_heads(tensor.transpose(1, 2), 0)

    def _load_values(self, tensor: torch.Tensor) -> None:
        self._load_heads(tensor, self.latent.nope_dim)

    def _load_heads(self, tensor: torch.Tensor, offset: int) -> None:
        rows, rank = tensor.shape[1:]
        for head in range(self.local_heads):
            shard = Shard(head * self._head_dim + offset, 0, rows, 0, rank)
            self._load("weight", shard, tensor[self.first_head + head])

    def process_after_load(self) -> None:
        assert self._stored is not None
        self.method.process_after_load(self._stored)
        unit = torch.eye(self.latent.kv_rank, dtype=self.dtype, device=self.device)
        dense = self.method.apply(self._stored, unit, None).T.unflatten(0, (self.local_heads, -1))
        self._stored = None
        if self.device.type == "cpu" and cpu_lacks(self.dtype):
            dense = dense.float()  # 16-bit products are emulated there
        w_uk, w_uv = dense.split([self.latent.nope_dim, self.latent.value_dim], dim=1)
        self.register_buffer("w_uk", w_uk.contiguous(), persistent=False)
        self.register_buffer("w_uv", w_uv.contiguous(), persistent=False)

    def absorb(self, q_nope: torch.Tensor, out: torch.Tensor) -> None:
        """Take queries into the latent space: `[rows, local heads, nope_dim]` times W_UK, written to `out`,
        `[rows, local heads, kv_rank]`; both may be views."""
        q_nope, out = q_nope.transpose(0, 1), out.transpose(0, 1)
        if self.w_uk.dtype is q_nope.dtype:
            torch.bmm(q_nope, self.w_uk, out=out)
        else:
            out.copy_(torch.bmm(q_nope.to(self.w_uk.dtype), self.w_uk))

    def expand(self, latent: torch.Tensor) -> torch.Tensor:
        """Every head's values from what it attended to: `[rows, local heads, kv_rank]` to
        `[rows, local heads * value_dim]`."""
        rows = latent.shape[0]
        latent = latent.transpose(0, 1)
        w_uv = self.w_uv.transpose(1, 2)
        if w_uv.dtype is latent.dtype:
            out = latent.new_empty(rows, self.local_heads, self.latent.value_dim)
            torch.bmm(latent, w_uv, out=out.transpose(0, 1))
            return out.flatten(1)
        return torch.bmm(latent.to(w_uv.dtype), w_uv).transpose(0, 1).flatten(1).to(latent.dtype)
