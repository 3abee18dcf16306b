"""Weights that stay quantized on a CPU and are computed on in that form: GGUF's own encodings, and int8.

Rows of activations are quantized to 8 bits on the way (see `octavo.kernels.reference_quant`).
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from octavo.errors import ConfigError, ModelError
from octavo.kernels import quant_ops
from octavo.kernels.cpu import quant
from octavo.kernels.cpu.products import GATES
from octavo.kernels.reference_quant import BLOCK, INT8, QuantFormat, QuantizedMatrix, quantize_int8
from octavo.quantization.embedding_method import EmbeddingMethod, UnquantizedEmbeddingMethod
from octavo.quantization.gguf_blocks import ENCODINGS
from octavo.quantization.linear_method import (
    GatedActivation,
    MatrixPart,
    ProductMemory,
    Shard,
    StoredRows,
)
from octavo.quantization.quantized_tensor import QuantizedTensor, joined

_STEP = 1 << 20  # weights that are quantized at a time: 4 MiB as float32

_PLAIN = UnquantizedEmbeddingMethod()


def packed_product_memory(parts: Sequence[tuple[int, QuantFormat]], dtype: torch.dtype) -> ProductMemory:
    """What products with `quant_ops.make_matrix` of parts of so many rows take, activations being `dtype`."""
    if not quant_ops.has_kernels():
        return ProductMemory()
    gates = dtype is not torch.float16 and len(parts) == 1 and parts[0][0] % (2 * quant.lanes()) == 0
    return ProductMemory(gate_copies=1 if gates else 3, codes=quant.CODE_BYTES)


class Store:
    """A layer's matrix, from its first shard to its final form.

    Attributes:
        matrix: the quantized matrix, once all shards are there; None where the checkpoint stores some of it
            unquantized: then `plain` holds the whole in the activations' dtype.
        embeds: whether an embedding looks rows up in it, so that `plain` keeps its weight as it is.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype):
        self.rows, self.columns, self.dtype = rows, columns, dtype
        self.matrix: quant_ops.Matrix | None = None
        self.plain: nn.Module | None = None
        self.embeds = False
        self._pieces: dict[int, QuantizedMatrix | torch.Tensor] = {}  # by their first row
        self._lock = threading.Lock()  # layers that share a store are finished side by side

    def add(self, first: int, piece: QuantizedMatrix | torch.Tensor) -> None:
        """A piece for rows from `first` on; the last one that is lacking makes the matrix."""
        self._pieces[first] = piece
        if sum(_rows(p) for p in self._pieces.values()) == self.rows:
            self.finish()

    def finish(self) -> None:
        """Make the matrix of what is there, if it is not yet made. Rows that nothing filled are zero."""
        with self._lock:
            if self.matrix is not None or self.plain is not None:
                return
            pieces = [self._pieces[first] for first in sorted(self._pieces)]
            quantized = [p for p in pieces if isinstance(p, QuantizedMatrix)]
            if len(quantized) == len(pieces):
                lacking = self.rows - sum(map(_rows, pieces))
                if lacking:
                    quantized.append(_zeros(quantized[-1], lacking))
                self.matrix = quant_ops.make_matrix(joined(quantized), self.columns)
            else:
                self._make_plain()
            self._pieces = {}

    def _make_plain(self) -> None:
        self.plain = nn.Module()
        _PLAIN.create_weights(self.plain, self.rows, self.columns, self.dtype, torch.device("cpu"))
        weight = self.plain.get_parameter("weight").data.zero_()
        for first, piece in self._pieces.items():
            values = QuantizedTensor.of(piece) if isinstance(piece, QuantizedMatrix) else piece
            weight[first : first + _rows(piece)].copy_(values)


def _rows(piece: QuantizedMatrix | torch.Tensor) -> int:
    return (piece.q if isinstance(piece, QuantizedMatrix) else piece).shape[0]


def _zeros(like: QuantizedMatrix, rows: int) -> QuantizedMatrix:
    def empty(t: torch.Tensor) -> torch.Tensor:
        return t.new_zeros(rows, t.shape[1])

    minimum = None if like.minimum is None else empty(like.minimum)
    return QuantizedMatrix(like.format, empty(like.q), empty(like.scale), minimum)


class QuantizedMethod(EmbeddingMethod):
    """A matrix in quantized form on the CPU: `layer.store`, and its bytes as the buffers `packed_…`."""

    def create_weights(
        self, layer: nn.Module, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if device.type == "meta":
            # Sizes alone are asked for: 8 bits and a scale are the most that a quantized weight takes.
            size = out_features * in_features * (BLOCK + 2) // BLOCK
            layer.register_buffer("packed_0", torch.empty(size, dtype=torch.uint8, device=device))
        elif device.type != "cpu":
            raise ConfigError(
                f"quantization={self.name!r} runs on a CPU, and the model is on {device}: leave it out"
            )
        layer.store = Store(out_features, in_features, dtype)  # type: ignore[assignment]

    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (out_features, in_features)}

    def load_shard(self, layer: nn.Module, name: str, tensor: torch.Tensor, shard: Shard) -> None:
        piece = tensor[shard.row : shard.row + shard.rows, shard.col : shard.col + shard.cols]
        _store(layer).add(shard.target, self._kept(piece))

    @abstractmethod
    def _kept(self, piece: torch.Tensor) -> QuantizedMatrix | torch.Tensor:
        """What is kept of a piece of a checkpoint's matrix until all are there; a copy."""

    @abstractmethod
    def kept_format(self, stored: str) -> QuantFormat | None:
        """The format that a matrix of a stored type is kept in; None: in the activations' dtype."""

    def kept_bytes(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        formats = self._formats(parts)
        if formats is None:
            return _PLAIN.kept_bytes(parts, columns, dtype, device)
        return quant_ops.matrix_bytes(formats, columns)

    def tied_bytes(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        return _PLAIN.tied_bytes(parts, columns, dtype, device) if self._formats(parts) is None else 0

    def product_memory(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> ProductMemory:
        formats = self._formats(parts)
        if formats is None:
            return _PLAIN.product_memory(parts, columns, dtype, device)
        return packed_product_memory(formats, dtype)

    def _formats(self, parts: Sequence[StoredRows]) -> list[tuple[int, QuantFormat]] | None:
        """Rows and format of each part, neighbours of one format joined; None if all become plain."""
        out: list[tuple[int, QuantFormat]] = []
        for rows, stored in parts:
            form = self.kept_format(stored)
            if form is None:
                return None
            if out and out[-1][1] == form:
                rows += out.pop()[0]
            out.append((rows, form))
        return out

    def process_after_load(self, layer: nn.Module) -> None:
        store = _store(layer)
        self._finish(layer)
        if store.plain is not None:
            layer.plain = nn.Module()  # an embedding that shares the store keeps its weight
            layer.plain.weight = store.plain.weight
            _PLAIN.process_after_load(layer.plain)
            if not store.embeds:
                store.plain = layer.plain  # what is repacked needs no second copy

    def finish_embedding(self, layer: nn.Module) -> None:
        self._finish(layer)

    def _finish(self, layer: nn.Module) -> None:
        store = _store(layer)
        store.finish()
        if store.matrix is not None:
            for i, data in enumerate(store.matrix.tensors):
                layer.register_buffer(f"packed_{i}", data, persistent=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        store: Store = layer.store  # type: ignore[assignment]
        matrix = store.matrix
        if matrix is None:
            return _PLAIN.apply(layer.plain, x, bias)  # type: ignore[arg-type]
        if x.dtype is torch.float16:
            return matrix.linear(x.float(), None if bias is None else bias.float()).to(x.dtype)
        return matrix.linear(x, bias)

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation
    ) -> torch.Tensor:
        matrix, gate = _store(layer).matrix, GATES.get(act)
        if gate is None or not isinstance(matrix, quant.PackedMatrix) or not matrix.gates:
            return super().apply_gated(layer, x, bias, act)
        if x.dtype is torch.float16:
            return super().apply_gated(layer, x, bias, act)
        return matrix.linear(x, bias, gate)

    def look_up(self, layer: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        store = _store(layer)
        if store.matrix is None:
            assert store.plain is not None
            return _PLAIN.look_up(store.plain, token_ids)
        wide = torch.float32 if store.dtype is torch.float16 else store.dtype
        rows = store.matrix.look_up(token_ids.reshape(-1), wide).to(store.dtype)
        return rows.view(*token_ids.shape, -1)

    def share(self, layer: nn.Module, source: nn.Module) -> None:
        layer.store = source.store
        _store(layer).embeds = True

    def same(self, layer: nn.Module, source: nn.Module) -> bool:
        ours, theirs = _store(layer), _store(source)
        ours.finish()
        theirs.finish()
        if ours.matrix is None or theirs.matrix is None:
            if ours.plain is None or theirs.plain is None:
                return False
            return _PLAIN.same(ours.plain, theirs.plain)
        return ours.matrix.equals(theirs.matrix)  # type: ignore[arg-type]


def _store(layer: nn.Module) -> Store:
    store: Store = layer.store  # type: ignore[assignment]
    return store


def num_plain(model: nn.Module) -> int:
    """How many of a model's matrices are in the activations' dtype, since no kernel takes their encoding or
    the checkpoint has them unquantized."""
    stores = {id(s): s for m in model.modules() if isinstance(s := getattr(m, "store", None), Store)}
    return sum(store.matrix is None for store in stores.values())


class GGUFMethod(QuantizedMethod):
    """The encodings of a GGUF file, kept: matrices come as `QuantizedTensor`s. What a file stores unquantized
    stays so."""

    name = "gguf"
    keeps: ClassVar[frozenset[str]] = frozenset(ENCODINGS)

    def kept_format(self, stored: str) -> QuantFormat | None:
        return ENCODINGS[stored].format if stored in ENCODINGS else None

    def part(
        self, name: str, out_features: int, in_features: int, order: torch.Tensor | None = None
    ) -> MatrixPart:
        plain = super().part(name, out_features, in_features, order)

        def load(layer: nn.Module, key: str, tensor: torch.Tensor, shard: Shard) -> None:
            last = shard.col + shard.cols
            if isinstance(tensor, QuantizedTensor) and (
                shard.col % BLOCK or (last % BLOCK and last != in_features)
            ):
                raise ConfigError(
                    f"{name}.{key}: columns {shard.col} to {last} of the matrix are one rank's, and {BLOCK} "
                    f"share a scale: use a tensor_parallel_size that gives each rank a multiple of {BLOCK} "
                    "columns"
                )
            plain.load_shard(layer, key, tensor, shard)

        return replace(plain, load_shard=load)

    def _kept(self, piece: torch.Tensor) -> QuantizedMatrix | torch.Tensor:
        return piece.matrix if isinstance(piece, QuantizedTensor) else piece.clone()


class Int8Method(QuantizedMethod):
    """Weights of any checkpoint rounded to int8 while loading, with a scale for every 32 columns of a row."""

    name = "int8"

    def kept_format(self, stored: str) -> QuantFormat | None:
        return INT8

    def _kept(self, piece: torch.Tensor) -> QuantizedMatrix | torch.Tensor:
        rows, columns = piece.shape
        padded = -(-columns // BLOCK) * BLOCK
        q = torch.empty(rows, padded, dtype=torch.int8)
        scale = torch.empty(rows, padded // BLOCK, dtype=torch.float16)
        step = max(1, _STEP // padded)
        wide = torch.empty(min(step, rows), columns)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            try:
                part = quantize_int8(wide[: last - first].copy_(piece[first:last]))
            except ValueError as error:
                raise ModelError(
                    f"quantization='int8': the checkpoint holds {error}: load it without quantization"
                ) from None
            q[first:last], scale[first:last] = part.q, part.scale
        return QuantizedMatrix(INT8, q, scale, None)
