"""How the weights of a linear layer are stored, loaded, repacked and applied."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from octavo.errors import ConfigError
from octavo.quantization import gpu_linear
from octavo.quantization.gpu_linear import GatedActivation as GatedActivation
from octavo.quantization.packed_linear import SIZES, pack, packed_linear
from octavo.quantization.scheme import QuantizationConfig
from octavo.quantization.shard import Region
from octavo.quantization.shard import Shard as Shard
from octavo.quantization.stored_tensor import StoredTensor


class AddingNorm(Protocol):
    """A norm of the residual stream (`octavo.layers.norm`)."""

    eps: float

    @property
    def rms_weight(self) -> torch.Tensor | None:
        """What a row is multiplied by once it is divided by its root mean square, `[size]`; None: the norm
        is another."""

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]: ...


StoredRows = tuple[int, str]
"""Rows of a checkpoint's tensor, and the type that they are stored in: PyTorch's name, or GGML's ("Q4_K")."""


@dataclass(frozen=True)
class MatrixPart:
    """What a checkpoint stores under one name for a layer's matrix, or for some rows of it.

    Attributes:
        tensors: by the names' ends (`weight`, `weight_scale`, …), with full shapes.
        load_shard: copies a shard of the full tensor of such a name into the layer.
        region: what it takes of that tensor; None: it may take all.
    """

    tensors: dict[str, StoredTensor]
    load_shard: Callable[[nn.Module, str, torch.Tensor, Shard], None]
    region: Callable[[str, Shard], Region | None]


@dataclass(frozen=True)
class ProductMemory:
    """What a product takes in a step beside the rows that it is of and its result.

    Attributes:
        gate_copies: of a gated activation's rows, as many as its result has numbers: 1 where that is all that
            a product makes, 2 where the next one encodes it on the way, 3 for gate, up and result.
        codes: bytes for each number of the rows, which are encoded on the way.
        joined_rows: rows up to which the result is made in one piece; of more it is there twice.
    """

    gate_copies: int = 3
    codes: int = 0
    joined_rows: int = sys.maxsize


class LinearMethod(ABC):
    """Owns the representation of a linear layer's matrix; the layer owns how it is sharded.

    A method is stateless: it registers parameters on the layer and reads them back. The bias, which
    no format quantizes, is the layer's.

    Attributes:
        name: the setting's value, or "unquantized".
        keeps: GGML's encodings in which a tensor may come: as a `QuantizedTensor`, or in its own float type.
    """

    name: str
    keeps: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register uninitialised parameters for a `[out_features, in_features]` matrix on `layer`.

        Sizes are this rank's; `dtype` is the type of activations.
        """

    @abstractmethod
    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """Name (`weight`, `weight_scale`, …) and full shape of each tensor a checkpoint stores for a
        matrix of that size."""

    @abstractmethod
    def load_shard(self, layer: nn.Module, name: str, tensor: torch.Tensor, shard: Shard) -> None:
        """Copy this rank's piece of the full checkpoint tensor `name` into `layer`."""

    def part(
        self, name: str, out_features: int, in_features: int, order: torch.Tensor | None = None
    ) -> MatrixPart:
        """What a checkpoint stores for the matrix `name`, `[out_features, in_features]`: all of the layer's,
        or one of those that it holds side by side.

        Args:
            order: int64 `[out_features]`, the checkpoint's rows in the order in which the layer has them;
                None: as they are. No shard's border parts rows that change places.

        Raises:
            ModelError: sizes that the format cannot pack.
        """
        shapes = self.checkpoint_tensors(out_features, in_features)

        def load(layer: nn.Module, name: str, tensor: torch.Tensor, shard: Shard) -> None:
            if order is not None:
                tensor = tensor[order.to(tensor.device)]
            self.load_shard(layer, name, tensor, shard)

        def region(name: str, shard: Shard) -> Region | None:
            if shapes[name] != (out_features, in_features):
                return None
            return Region(shapes[name], (shard.row, shard.col), (shard.rows, shard.cols))

        return MatrixPart({name: StoredTensor(shape) for name, shape in shapes.items()}, load, region)

    def process_after_load(self, layer: nn.Module) -> None:  # noqa: B027 (optional hook)
        """Repack once all shards are there. A tied head's matrix is also its embedding's: take it away
        from the layer if you like, but do not change it in place."""

    def kept_bytes(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        """Bytes of a matrix once it is loaded and repacked, so that memory can be planned before.

        Args:
            parts: what the checkpoint's tensors give this rank's matrix, in order.
            columns: of this rank's matrix.
            dtype: of activations.
            device: where the model will run.
        """
        return sum(rows for rows, _ in parts) * columns * dtype.itemsize

    def kept_columns(self, columns: int, whole: int, device: torch.device) -> int:
        """Columns that are kept, about, of a rank's `columns` of a matrix of `whole`: more where a format
        fills up what a border parts."""
        return columns

    def tied_bytes(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        """Bytes that a head takes beside the embedding whose matrix it shares; arguments as `kept_bytes`."""
        return 0

    def product_memory(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> ProductMemory:
        """What products with a matrix take in a step; arguments as `kept_bytes`."""
        return ProductMemory()

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W^T + bias`: `[rows, in]` to `[rows, out]`, in `x`'s dtype."""

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation
    ) -> torch.Tensor:
        """`act` of the product: `[rows, in]` to `[rows, out / 2]`. Override it where one kernel does both."""
        return act(self.apply(layer, x, bias))

    def takes_gates(self, layer: nn.Module, x: torch.Tensor) -> bool:
        """Whether a gated activation before this product should be left to `apply_to_gates`, at as many rows
        as `x` has, rather than to the product before it (`apply_gated`)."""
        return False

    def apply_to_gates(
        self, layer: nn.Module, gates: torch.Tensor, act: GatedActivation, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of `act` of rows `[rows, 2 in]`. Override it, and `takes_gates`, where the activation
        can end in another form (quantized rows)."""
        return self.apply(layer, act(gates), bias)

    def apply_after(
        self,
        layer: nn.Module,
        norm: AddingNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        act: GatedActivation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product (or, with `act`, that of it) of `norm.add(x, residual)`, and the new residual stream.

        Override it where the norm can be part of the kernel, or end in another form (quantized rows).
        `residual` may be overwritten; go on with the stream that is returned.
        """
        x, residual = norm.add(x, residual)
        out = self.apply(layer, x, bias) if act is None else self.apply_gated(layer, x, bias, act)
        return out, residual


# Rows from which widening wins (measured on AVX2, SmolLM2's shapes: 1.7 to 2.4 times as fast as
# PyTorch's bfloat16 product at 8 rows, 3.4 to 5 at 32), and float32 elements of a slice: 1 MiB, so
# that it is still in the cache when it is multiplied.
_WIDEN_ROWS = 8
_WIDEN_ELEMENTS = 1 << 18


@functools.cache
def cpu_lacks(dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies this 16-bit type only by emulation (no AVX-512, AMX or the like)."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if not torch.backends.mkldnn.is_available():
        return True
    if dtype is torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def widening_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` of 16-bit tensors by float32 products over slices of the weight, widened one by one.

    Sums are float32's, as in the 16-bit product; results are rounded once to `x`'s dtype.
    """
    rows = max(1, _WIDEN_ELEMENTS // weight.shape[1])
    wide_x = x.float()
    scratch = torch.empty(min(rows, weight.shape[0]), weight.shape[1])
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    for start in range(0, weight.shape[0], rows):
        piece = weight[start : start + rows]
        wide = scratch[: piece.shape[0]].copy_(piece)
        wide_bias = None if bias is None else bias[start : start + rows].float()
        out[:, start : start + rows] = F.linear(wide_x, wide, wide_bias)
    return out


# oneDNN's float32 sums over packed weights round about twice as much as `F.linear`'s when they are long
# (rms 2.0e-5 against 1.0e-5 over 1536 columns), and are hardly faster there.
_PACK_FLOAT32_COLUMNS = 1024


def packs(dtype: torch.dtype, columns: int, device: torch.device) -> bool:
    """Whether a matrix is kept in oneDNN's own layout: on a CPU, in a type that it multiplies itself.

    Measured with 2 threads on AVX2 in float32, SmolLM2's layers and head together, against `F.linear`:
    1.4 times as fast at 1 row, 1.9 to 2.2 at 4 and 8, 1.3 to 1.9 at 32 and 64, 1.3 at 2048.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.float32 and columns > _PACK_FLOAT32_COLUMNS:
        return False
    return dtype in (torch.float32, torch.bfloat16) and not cpu_lacks(dtype)


class UnquantizedLinearMethod(LinearMethod):
    """The matrix as it is, `weight [out, in]` in the activations' dtype; packed for oneDNN on a CPU.

    Attributes:
        fuses: whether norms and activations may be part of a product's kernel, where rows choose it.
    """

    name = "unquantized"
    fuses: ClassVar[bool] = True

    def create_weights(
        self, layer: nn.Module, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (out_features, in_features)}

    def load_shard(self, layer: nn.Module, name: str, tensor: torch.Tensor, shard: Shard) -> None:
        piece = tensor[shard.row : shard.row + shard.rows, shard.col : shard.col + shard.cols]
        layer.get_parameter("weight")[shard.target : shard.target + shard.rows].copy_(piece)

    def process_after_load(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight")
        layer.packed = None  # type: ignore[assignment]
        if packs(weight.dtype, weight.shape[1], weight.device):
            layer.packed = pack(weight)
            del layer._parameters["weight"]

    def tied_bytes(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        # The embedding looks rows up in the plain matrix, and the head multiplies with the packed one.
        return self.kept_bytes(parts, columns, dtype, device) if packs(dtype, columns, device) else 0

    def product_memory(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> ProductMemory:
        return ProductMemory(joined_rows=SIZES[-1]) if packs(dtype, columns, device) else ProductMemory()

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed: torch.Tensor | None = layer.packed  # type: ignore[assignment]
        if packed is not None:
            return packed_linear(x, packed, bias)
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        if x.is_cpu and x.shape[0] >= _WIDEN_ROWS and cpu_lacks(x.dtype):
            return widening_linear(x, weight, bias)
        if gpu_linear.serves(x):
            return gpu_linear.linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation
    ) -> torch.Tensor:
        if self.fuses and gpu_linear.serves(x):
            return gpu_linear.linear(x, layer.weight, bias, act)  # type: ignore[arg-type]
        return super().apply_gated(layer, x, bias, act)

    def apply_after(
        self,
        layer: nn.Module,
        norm: AddingNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        act: GatedActivation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = norm.rms_weight if self.fuses and gpu_linear.serves(x) else None
        if scale is not None:
            weight: torch.Tensor = layer.weight  # type: ignore[assignment]
            fused = gpu_linear.rms_norm_linear(x, residual, scale, norm.eps, weight, bias, act)
            if fused is not None:
                return fused
        return super().apply_after(layer, norm, x, residual, bias, act)


def linear_method(
    quantization: QuantizationConfig | None, prefix: str, parts: Sequence[str] = ()
) -> LinearMethod:
    """The method for the layer named `prefix`.

    Args:
        quantization: of the model; None: numbers in the activations' dtype.
        prefix: a checkpoint may hold the layer's matrix under this name,
        parts: or as several, side by side, under these.

    Raises:
        ConfigError: a format that this version does not know.
    """
    if quantization is None:
        return UnquantizedLinearMethod()
    # Methods build on this module.
    from octavo.quantization.half_method import HalfMethod
    from octavo.quantization.quantized_method import GGUFMethod, Int8Method

    for method in (GGUFMethod, HalfMethod, Int8Method):
        if quantization.format == method.name:
            return method()
    if quantization.rules:
        from octavo.quantization.checkpoint_method import checkpoint_method

        return checkpoint_method(quantization, prefix, parts)
    raise ConfigError(
        f"quantization by {quantization.format!r} is not supported by this version: leave it out"
    )
