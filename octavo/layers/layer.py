"""What every layer with weights is: built for a device and a rank, then filled from a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.parallel.state import TensorParallelGroup
from octavo.quantization.experts_method import ExpertsMethod, experts_method
from octavo.quantization.linear_method import LinearMethod, MatrixPart
from octavo.quantization.shard import Region, Shard
from octavo.quantization.stored_tensor import FLOATS, Dummy


@dataclass(frozen=True)
class BuildContext:
    """Everything about placement that a model file does not know.

    Attributes:
        dtype: of weights and activations.
        device: where parameters are made ("meta" makes shapes only).
        max_model_len: tokens of the longest context; sizes and fixes the rotary tables.
        attention_backend: "torch", "cpu" or "triton".
        block_size: tokens per KV block.
        kv_dtype: of the KV cache, under `KVFormat`'s names.
        kv_offset: whether codes of int8 shall have offsets.
        group: the tensor-parallel ranks.
        linear_method: from a layer's name (and those of matrices that checkpoints hold apart) to the method
            that stores its matrix.
        expert_parallel: whether each rank holds some experts whole, instead of a slice of each.
        experts_method: from a layer's name (and those that checkpoints have for the first expert's matrices)
            to the method that stores its experts.
    """

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    attention_backend: str
    block_size: int
    kv_dtype: str
    group: TensorParallelGroup
    linear_method: Callable[..., LinearMethod]
    experts_method: Callable[..., ExpertsMethod] = partial(experts_method, None)
    kv_offset: bool = False
    expert_parallel: bool = False


@dataclass(frozen=True)
class LoadTarget:
    """Where one checkpoint tensor goes: its full shape there, and what copies this rank's piece.

    Its tensor may also have one of `other_shapes` (a scale as a number or as a vector).
    `covers` makes it another spelling of the targets that it names (a fused matrix of its parts, a
    stack of single experts): a checkpoint holds either these or it. `encodings` are GGML's, in which it takes
    a tensor as it is stored, as a `QuantizedTensor`. `dtypes` are the types in which it may come. `dummy`
    makes a random one where the ordinary random numbers are none (None: they are). With `any_size` its shape
    says nothing. `regions` are what this rank takes of it (None: all), so that no more of a file is read.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    optional: bool = False
    covers: tuple[str, ...] = ()
    encodings: frozenset[str] = frozenset()
    other_shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: frozenset[torch.dtype] = FLOATS
    dummy: Dummy | None = None
    any_size: bool = False
    regions: tuple[Region, ...] | None = None

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape may fill it."""
        return self.any_size or shape == self.shape or shape in self.other_shapes


class Layer(nn.Module, ABC):
    """A module that owns weights or tables.

    Its constructor takes what the paper says (sizes, bias); `create_weights` then makes this rank's
    parameters for a `BuildContext`, so that a model file knows neither ranks nor formats.
    """

    @abstractmethod
    def create_weights(self, build: BuildContext, prefix: str) -> None:
        """Make this rank's parameters and buffers; `prefix` is the module's name in the model."""

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        """The checkpoint tensors that fill this layer, by their full names."""
        return {}

    def process_after_load(self) -> None:  # noqa: B027 (optional hook)
        """Called once, after all tensors were loaded."""


def empty_parameter(*shape: int, build: BuildContext) -> nn.Parameter:
    """An uninitialised parameter in the model's dtype, on its device."""
    return nn.Parameter(torch.empty(*shape, dtype=build.dtype, device=build.device), requires_grad=False)


def copy_into(parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """What loads a tensor that every rank holds whole."""

    def load(tensor: torch.Tensor) -> None:
        parameter.copy_(tensor)

    return load


def matrix_targets(
    name: str,
    part: MatrixPart,
    load: Callable[[str, torch.Tensor], None],
    shards: Sequence[Shard],
    encodings: frozenset[str] = frozenset(),
    optional: bool = False,
) -> dict[str, LoadTarget]:
    """The targets of what a checkpoint stores for the matrix `name`; `load` gets the end of each tensor's
    name, and the tensor, of which it takes `shards`."""
    return {
        f"{name}.{key}": LoadTarget(
            stored.full_shape,
            partial(load, key),
            optional or stored.optional,
            encodings=encodings,
            other_shapes=stored.other_shapes,
            dtypes=stored.dtypes,
            dummy=stored.dummy,
            any_size=stored.any_size,
            regions=_regions(part, key, shards),
        )
        for key, stored in part.tensors.items()
    }


def _regions(part: MatrixPart, key: str, shards: Sequence[Shard]) -> tuple[Region, ...] | None:
    found = [part.region(key, shard) for shard in shards]
    return None if None in found else tuple(region for region in found if region is not None)


def sibling(prefix: str, name: str) -> str:
    """`name` beside the module `prefix`: ("a.b.qkv_proj", "q_proj") is "a.b.q_proj"."""
    parent, dot, _ = prefix.rpartition(".")
    return f"{parent}{dot}{name}"


def divide(size: int, group: TensorParallelGroup, what: str, instead: str = "") -> int:
    """`size` per rank; `instead` is a further remedy, for the message.

    Raises:
        ConfigError: it does not divide evenly.
    """
    if size % group.size:
        raise ConfigError(
            f"{what}={size} cannot be split over tensor_parallel_size={group.size}: use a divisor of {size}"
            f"{instead}"
        )
    return size // group.size
