"""How the matrices of a layer's experts are stored, loaded, repacked and applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from octavo.errors import ConfigError
from octavo.kernels import moe_ops
from octavo.quantization.linear_method import cpu_lacks, widening_linear
from octavo.quantization.scheme import QuantizationConfig
from octavo.quantization.shard import Region
from octavo.quantization.stored_tensor import StoredTensor

Matrix = Literal["gate", "up", "down"]


@dataclass(frozen=True)
class ExpertShard:
    """The slice of the experts' inner dimension that a rank holds: `first .. first + size` of `total`.

    They are rows of gate and up, columns of down. `first_expert` is the number of its first expert, for
    messages: the methods count a rank's experts from 0.
    """

    first: int
    size: int
    total: int
    first_expert: int = 0


def piece_of(
    matrix: Matrix, rows: int, columns: int, shard: ExpertShard
) -> tuple[tuple[int, int], tuple[int, int]]:
    """First row and column, and numbers of both, of a rank's piece of an expert's `[rows, columns]`."""
    if matrix == "down":
        return (0, shard.first), (rows, shard.size)
    return (shard.first, 0), (shard.size, columns)


class ExpertsMethod(ABC):
    """Owns the representation of the experts' matrices, sister of `LinearMethod`; the layer owns sharding.

    A method is stateless: it registers parameters on the layer and reads them back. Experts have no
    biases.
    """

    name: str

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Register uninitialised parameters on `layer` for `num_experts` SwiGLU feed-forwards.

        `inner_size` is this rank's; `dtype` is the type of activations.
        """

    @abstractmethod
    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """Name (`weight`, `weight_scale`, …) and full shape of each tensor that a checkpoint stores for
        one expert's matrix of that size."""

    def stored(self, matrix: Matrix, out_features: int, in_features: int) -> dict[str, StoredTensor]:
        """What a checkpoint stores for one expert's matrix, by the names' ends, with full shapes."""
        shapes = self.checkpoint_tensors(out_features, in_features)
        return {name: StoredTensor(shape) for name, shape in shapes.items()}

    def region(
        self, matrix: Matrix, name: str, out_features: int, in_features: int, shard: ExpertShard
    ) -> Region | None:
        """What `load_shard` takes of one expert's tensor `name`; None: it may take all."""
        return Region((out_features, in_features), *piece_of(matrix, out_features, in_features, shard))

    def kept_bytes(
        self, num_experts: int, hidden_size: int, inner_size: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        """Bytes of the experts once they are loaded, so that memory can be planned before; arguments as of
        `create_weights`, with the device on which the model will run."""
        return 3 * num_experts * hidden_size * inner_size * dtype.itemsize

    def recordable(self, layer: nn.Module) -> bool:
        """Whether `apply` can be recorded in a device graph."""
        return True

    @abstractmethod
    def load_shard(
        self,
        layer: nn.Module,
        name: str,
        matrix: Matrix,
        expert: int | slice,
        tensor: torch.Tensor,
        shard: ExpertShard,
    ) -> None:
        """Copy this rank's piece of the full checkpoint tensor `name` of one expert's matrix into `layer`.

        With a slice for `expert`, `tensor` has one entry per expert of it in front.
        """

    def process_after_load(self, layer: nn.Module) -> None:  # noqa: B027 (optional hook)
        """Repack once all shards are there."""

    @abstractmethod
    def apply(
        self, layer: nn.Module, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """This rank's part of every row's weighted sum of SwiGLU experts.

        Args:
            x: `[rows, hidden]`.
            weights: float32 `[rows, top_k]`.
            experts: int32 `[rows, top_k]`, counted from this rank's first; their number for those of others.

        Returns:
            A new `[rows, hidden]` of `x`'s dtype.
        """


class UnquantizedExpertsMethod(ExpertsMethod):
    """`w13 [experts, 2 * inner, hidden]` (gate's rows, then up's) and `w2 [experts, hidden, inner]`."""

    name = "unquantized"

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes = {"w13": (2 * inner_size, hidden_size), "w2": (hidden_size, inner_size)}
        for name, shape in shapes.items():
            weight = torch.empty(num_experts, *shape, dtype=dtype, device=device)
            layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (out_features, in_features)}

    def load_shard(
        self,
        layer: nn.Module,
        name: str,
        matrix: Matrix,
        expert: int | slice,
        tensor: torch.Tensor,
        shard: ExpertShard,
    ) -> None:
        parameters = layer._parameters  # thousands of calls: the plain dictionary, no look-ups by path
        if matrix == "down":
            target, dim = parameters["w2"][expert], -1  # type: ignore[index]
        else:
            target, dim = parameters["w13"][expert], -2  # type: ignore[index]
            target = target.narrow(-2, 0 if matrix == "gate" else shard.size, shard.size)
        if shard.size != shard.total:
            tensor = tensor.narrow(dim, shard.first, shard.size)
        target.copy_(tensor)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        w13: torch.Tensor = layer.w13  # type: ignore[assignment]
        w2: torch.Tensor = layer.w2  # type: ignore[assignment]
        linear = widening_linear if x.is_cpu and cpu_lacks(x.dtype) else F.linear
        return moe_ops.experts(x, w13, w2, weights, experts, linear)


def experts_method(
    quantization: QuantizationConfig | None, prefix: str, names: Mapping[Matrix, str] | None = None
) -> ExpertsMethod:
    """The method for the experts of the layer named `prefix`.

    Args:
        quantization: of the model.
        prefix: the layer.
        names: what a checkpoint calls the first expert's matrices.

    Raises:
        ConfigError: a format that this version does not know.
    """
    # The experts of models in these forms are expanded.
    if quantization is None or quantization.format in ("gguf", "half", "int8"):
        return UnquantizedExpertsMethod()
    if quantization.rules and names is not None:
        from octavo.quantization.checkpoint_experts import checkpoint_experts  # which builds on this module

        return checkpoint_experts(quantization, names)
    raise ConfigError(
        f"quantization by {quantization.format!r} is not supported for experts by this version: leave it out"
    )
