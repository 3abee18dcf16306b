"""Linear layers that own their sharding over tensor-parallel ranks (Megatron-LM, arXiv 1909.08053).

Column-parallel layers split the output and need no communication; a row-parallel layer splits the
input and adds the ranks' partial results. How the matrix is stored is the `LinearMethod`'s business.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from octavo.errors import ConfigError
from octavo.layers.layer import (
    BuildContext,
    Layer,
    LoadTarget,
    copy_into,
    divide,
    empty_parameter,
    matrix_targets,
    sibling,
)
from octavo.parallel.state import TensorParallelGroup
from octavo.quantization.linear_method import AddingNorm, GatedActivation, LinearMethod, MatrixPart, Shard
from octavo.quantization.shard import Region


class MergedColumnParallelLinear(Layer):
    """Several matrices over one input, stored and multiplied as one, each split by output rows.

    A checkpoint may hold them apart or, like Phi-3's, as one under the layer's own name.

    Args:
        in_features: columns of every matrix.
        parts: checkpoint name (the last component before `.weight`) and output rows of each, in the
            order in which they lie in the output.
        bias: whether each has a bias.
    """

    method: LinearMethod
    group: TensorParallelGroup

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False):
        super().__init__()
        self.in_features = in_features
        self.parts = parts
        self.has_bias = bias

    def part_rows(self, name: str) -> tuple[int, int]:
        """First row and number of rows of a part that this rank holds."""
        rows = divide(self.parts[name], self.group, f"{name}'s output size")
        return self.group.rank * rows, rows

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.group = build.group
        names = [sibling(prefix, part) for part in self.parts if part]
        self.method = build.linear_method(prefix, names)
        self.local_sizes = [self.part_rows(name)[1] for name in self.parts]
        total = sum(self.local_sizes)
        self.method.create_weights(self, total, self.in_features, build.dtype, build.device)
        self.bias = empty_parameter(total, build=build) if self.has_bias else None

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        targets: dict[str, LoadTarget] = {}
        fused: list[Shard] = []
        target = first = 0
        for part, out_features in self.parts.items():
            row, rows = self.part_rows(part)
            shard = Shard(target, row, rows, 0, self.in_features)
            name = sibling(prefix, part) if part else prefix
            targets |= self._targets(name, out_features, [shard], self.row_order(part))
            fused.append(replace(shard, row=first + row))
            target, first = target + rows, first + out_features
        if len(self.parts) > 1:
            for name, whole in self._targets(prefix, first, fused, None).items():
                kind = name.removeprefix(f"{prefix}.")
                covers = tuple(f"{sibling(prefix, part)}.{kind}" for part in self.parts)
                targets[name] = replace(whole, covers=covers)
        return targets

    def row_order(self, part: str) -> torch.Tensor | None:
        """The rows of a part's checkpoint matrix in the order in which the layer has them, int64; None: as
        they are. A rank's rows stay among themselves."""
        return None

    def _targets(
        self, name: str, out_features: int, shards: list[Shard], order: torch.Tensor | None
    ) -> dict[str, LoadTarget]:
        """The tensors of a matrix of `out_features` rows, of which this rank takes `shards`."""
        part = self.method.part(name, out_features, self.in_features, order)
        load = partial(self._load_weight, part, shards)
        targets = matrix_targets(name, part, load, shards, self.method.keeps)
        if self.has_bias:
            mine = tuple(Region((out_features,), (shard.row,), (shard.rows,)) for shard in shards)
            load_bias = partial(self._load_bias, shards, order)
            targets[f"{name}.bias"] = LoadTarget((out_features,), load_bias, regions=mine)
        return targets

    def _load_weight(self, part: MatrixPart, shards: list[Shard], name: str, tensor: torch.Tensor) -> None:
        for shard in shards:
            part.load_shard(self, name, tensor, shard)

    def _load_bias(self, shards: list[Shard], order: torch.Tensor | None, tensor: torch.Tensor) -> None:
        assert self.bias is not None
        if order is not None:
            tensor = tensor[order.to(tensor.device)]
        for shard in shards:
            piece = tensor[shard.row : shard.row + shard.rows]
            self.bias[shard.target : shard.target + shard.rows].copy_(piece)

    def process_after_load(self) -> None:
        self.method.process_after_load(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in_features]` to this rank's `[rows, sum of local part sizes]`."""
        return self.method.apply(self, x, self.bias)

    def gated(self, act: GatedActivation, x: torch.Tensor) -> torch.Tensor:
        """`act(self(x))`, in one kernel where there is one."""
        return self.method.apply_gated(self, x, self.bias, act)

    def after(
        self,
        norm: AddingNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        act: GatedActivation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`self` (with `act`, `self.gated`) of `norm.add(x, residual)`, and the stream that `add` returns:
        in one kernel where there is one."""
        return self.method.apply_after(self, norm, x, residual, self.bias, act)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One matrix, split by output rows: `[rows, in_features]` to `[rows, out_features / ranks]`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, {"": out_features}, bias)


class ReplicatedLinear(MergedColumnParallelLinear):
    """One matrix that every rank holds whole: `[rows, in_features]` to `[rows, out_features]`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, {"": out_features}, bias)

    def part_rows(self, name: str) -> tuple[int, int]:
        return 0, self.parts[name]


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections as one matrix, split by heads.

    With fewer KV heads than ranks each KV head is held by several ranks, those of its queries.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False
    ):
        kv_size = num_kv_heads * head_dim
        super().__init__(
            hidden_size, {"q_proj": num_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}, bias
        )
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads

    def part_rows(self, name: str) -> tuple[int, int]:
        if name == "q_proj":
            heads = divide(self.num_heads, self.group, "num_attention_heads")
            return self.group.rank * heads * self.head_dim, heads * self.head_dim
        heads = local_kv_heads(self.num_kv_heads, self.group)
        first = self.group.rank * self.num_kv_heads // self.group.size
        return first * self.head_dim, heads * self.head_dim

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[rows, hidden_size]`: `[rows, local heads, head_dim]` of q, k and v (views)."""
        return self.heads(self(x))

    def heads(self, product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of a projection's q, k and v."""
        q, k, v = product.unflatten(-1, (-1, self.head_dim)).split(self.local_heads, dim=1)
        return q, k, v

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        super().create_weights(build, prefix)
        self.local_heads = [size // self.head_dim for size in self.local_sizes]


def local_kv_heads(num_kv_heads: int, group: TensorParallelGroup) -> int:
    """KV heads that each rank holds: its share, or one where there are fewer than ranks.

    Raises:
        ConfigError: neither number divides the other.
    """
    if num_kv_heads % group.size == 0:
        return num_kv_heads // group.size
    if group.size % num_kv_heads == 0:
        return 1
    raise ConfigError(
        f"num_key_value_heads={num_kv_heads} cannot be split over tensor_parallel_size={group.size}: "
        f"use a divisor or a multiple of {num_kv_heads}"
    )


class RowParallelLinear(Layer):
    """One matrix, split by input columns; the ranks' results are added.

    Takes this rank's `[rows, in_features / ranks]`, returns the full `[rows, out_features]`.

    Args:
        reduce_results: False leaves the addition over the ranks to the caller.
    """

    method: LinearMethod
    group: TensorParallelGroup

    def __init__(self, in_features: int, out_features: int, bias: bool = False, reduce_results: bool = True):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.reduce_results = reduce_results

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.group = build.group
        self.method = build.linear_method(prefix)
        self.local_in = divide(self.in_features, self.group, f"{prefix}'s input size")
        self.method.create_weights(self, self.out_features, self.local_in, build.dtype, build.device)
        self.bias = empty_parameter(self.out_features, build=build) if self.has_bias else None

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        shard = Shard(0, 0, self.out_features, self.group.rank * self.local_in, self.local_in)
        part = self.method.part(prefix, self.out_features, self.in_features)
        load = partial(self._load_weight, part, shard)
        targets = matrix_targets(prefix, part, load, [shard], self.method.keeps)
        if self.bias is not None:
            targets[f"{prefix}.bias"] = LoadTarget((self.out_features,), copy_into(self.bias))
        return targets

    def _load_weight(self, part: MatrixPart, shard: Shard, name: str, tensor: torch.Tensor) -> None:
        part.load_shard(self, name, tensor, shard)

    def process_after_load(self) -> None:
        self.method.process_after_load(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(self.method.apply(self, x, self._own_bias()))

    def takes_gates(self, x: torch.Tensor) -> bool:
        """Whether the activation before is better left to `of_gates`, at as many rows as `x` has."""
        return self.method.takes_gates(self, x)

    def of_gates(self, act: GatedActivation, gates: torch.Tensor) -> torch.Tensor:
        """`self(act(gates))`: of this rank's `[rows, 2 in_features / ranks]`."""
        return self._reduced(self.method.apply_to_gates(self, gates, act, self._own_bias()))

    def _own_bias(self) -> torch.Tensor | None:
        # One rank adds the bias, or the sum would hold it once per rank.
        return self.bias if self.group.rank == 0 else None

    def _reduced(self, out: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(out) if self.reduce_results else out
