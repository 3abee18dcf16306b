"""Matrices of quantized checkpoints, of any format, in the form that the device multiplies."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from octavo.kernels.reference_lowbit import FP8
from octavo.quantization import capability
from octavo.quantization.capability import Hardware, Running
from octavo.quantization.checkpoint_runners import (
    DenseRunner,
    MatricesRunner,
    PackedRunner,
    Runner,
    Unpackable,
    packable,
    packed_format,
)
from octavo.quantization.layout import LEAST_GROUP, DenseLayout, Layout
from octavo.quantization.layout_bitsandbytes import Bits4Layout, Int8Layout
from octavo.quantization.layout_compressed_tensors import CompressedLayout, Fp8Layout, PackedLayout
from octavo.quantization.layout_gptq import AWQLayout, GPTQLayout
from octavo.quantization.layout_online import OnlineLayout
from octavo.quantization.linear_method import (
    AddingNorm,
    GatedActivation,
    LinearMethod,
    MatrixPart,
    ProductMemory,
    StoredRows,
    UnquantizedLinearMethod,
)
from octavo.quantization.local_hardware import hardware_of
from octavo.quantization.matrices import Matrix, Matrix8, blank_matrix, join
from octavo.quantization.quantized_method import packed_product_memory
from octavo.quantization.rounding import fitted
from octavo.quantization.scheme import QuantizationConfig, Rule, WeightScheme
from octavo.quantization.shard import Region, Shard

logger = logging.getLogger(__name__)

Dense = Literal["plain", "half"]


def checkpoint_method(config: QuantizationConfig, prefix: str, parts: Sequence[str] = ()) -> LinearMethod:
    """The method of a layer; `prefix` and `parts` as for `linear_method`."""
    rules = {name: config.rule_for(name) for name in (*parts, prefix)}
    if all(rule is None for rule in rules.values()):
        return dense_method(config.dense)
    return CheckpointMethod(config, rules)


def dense_method(kind: Dense) -> LinearMethod:
    """The method of a layer that is not quantized."""
    from octavo.quantization.half_method import HalfMethod

    return HalfMethod() if kind == "half" else UnquantizedLinearMethod()


def layout_of(config: QuantizationConfig, rule: Rule | None) -> Layout:
    """How the matrices of a rule are packed; None: they are not quantized."""
    if rule is None or rule.scheme is None:
        return DenseLayout()
    if config.format == "online":
        return OnlineLayout(rule)
    makers: dict[str, Callable[[Rule], Layout]] = {"gptq": GPTQLayout, "awq": AWQLayout, "fp8": Fp8Layout}
    if config.format == "bitsandbytes":
        return Int8Layout() if rule.layout == "int8" else Bits4Layout(rule)
    if config.format == "compressed-tensors":
        return PackedLayout(rule) if rule.layout == "pack-quantized" else CompressedLayout(rule)
    return makers[config.format](rule)


def scheme_at(config: QuantizationConfig, scheme: WeightScheme, columns: int) -> WeightScheme:
    """The scheme of a rank's matrix of so many columns, whose groups are smaller where the engine chooses
    them, or where ranks part those of the checkpoint.

    Raises:
        ModelError: no size of groups divides the columns.
    """
    if config.format == "online":
        return fitted(scheme, columns)
    if scheme.group_size is None or scheme.act_order:
        return scheme
    return replace(scheme, group_size=math.gcd(scheme.group_size, columns))


def mode_of(config: QuantizationConfig, scheme: WeightScheme, hardware: Hardware) -> Running:
    """What a matrix of a scheme gets, under a config that may ask for all to be dequantized."""
    if config.dequantize:
        return Running("dequantized", "quantization='none' asks for it")
    return capability.running(scheme, hardware)


def describe_modes(config: QuantizationConfig, hardware: Hardware) -> list[str]:
    """For each scheme of a checkpoint its name, and what runs instead where that differs, with the reason."""
    out = []
    for scheme in config.schemes:
        running = mode_of(config, scheme, hardware)
        out.append(scheme.name if running.reason is None else f"{scheme.name} as {running}")
    return out


@dataclass
class _Piece:
    """One part's tensors, as far as they have come."""

    name: str
    layout: Layout
    rule: Rule | None
    shard: Shard
    columns: int
    order: torch.Tensor | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class CheckpointMethod(LinearMethod):
    """A layer's quantized matrix, some parts of which may be of another scheme, or not quantized.

    The tensors are copied to the device as they come; once all are there, `layer.runner` is made of them.

    Args:
        config: of the model.
        rules: by the names of the parts, and of the whole.
    """

    def __init__(self, config: QuantizationConfig, rules: dict[str, Rule | None]):
        self.config = config
        self.rules = rules
        self.name = config.format

    def part(
        self, name: str, out_features: int, in_features: int, order: torch.Tensor | None = None
    ) -> MatrixPart:
        rule = self.rules.get(name, next(iter(self.rules.values())))
        layout = layout_of(self.config, rule)
        tensors = layout.tensors(out_features, in_features)
        for key, stored in tensors.items():
            stored.check(f"{name}.{key}", out_features, in_features)

        def load(layer: nn.Module, key: str, tensor: torch.Tensor, shard: Shard) -> None:
            pieces: dict[int, _Piece] = layer.pieces  # type: ignore[assignment]
            piece = pieces.get(shard.target)
            if piece is None:
                local = None if order is None else order[shard.row : shard.row + shard.rows] - shard.row
                piece = _Piece(name, layout, rule, shard, in_features, local)
                pieces[shard.target] = piece
            stored, full = tensors[key], f"{name}.{key}"
            view = stored.cut(full, layout.arranged(key, tensor, out_features, in_features), shard)
            device: torch.device = layer.matrix_device  # type: ignore[assignment]
            kept = layout.kept(full, key, view, device)
            if key in kept:
                stored.check_numbers(full, kept[key])
            piece.tensors |= kept

        shapes = {
            key: replace(
                stored,
                axes=layout.stored_shape(key, out_features, in_features)
                or stored.shape(out_features, in_features),
            )
            for key, stored in tensors.items()
        }

        def region(key: str, shard: Shard) -> Region | None:
            return tensors[key].region(f"{name}.{key}", out_features, in_features, shard)

        return MatrixPart(shapes, load, region)

    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        part = self.part(next(reversed(self.rules)), out_features, in_features)
        return {key: stored.shape(out_features, in_features) for key, stored in part.tensors.items()}

    def load_shard(self, layer: nn.Module, name: str, tensor: torch.Tensor, shard: Shard) -> None:
        rows, columns = layer.matrix_shape  # type: ignore[misc]
        self.part(next(reversed(self.rules)), int(rows), int(columns)).load_shard(layer, name, tensor, shard)

    def create_weights(
        self, layer: nn.Module, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer.pieces = {}  # type: ignore[assignment]
        layer.matrix_shape = (out_features, in_features)  # type: ignore[assignment]
        layer.matrix_device = device  # type: ignore[assignment]
        layer.matrix_hardware = hardware_of(device)  # type: ignore[assignment]
        layer.activation_dtype = dtype  # type: ignore[assignment]
        if device.type == "meta":  # sizes alone are asked for
            self._blank(layer).register(layer)

    def process_after_load(self, layer: nn.Module) -> None:
        runner = self._made(layer) if layer.pieces else self._blank(layer)
        layer.runner = runner  # type: ignore[assignment]
        runner.register(layer)

    def _blank(self, layer: nn.Module) -> Runner:
        """A runner of tensors of the right sizes, all of one part's scheme, for runs without weights."""
        rows, columns = layer.matrix_shape  # type: ignore[misc]
        dtype: torch.dtype = layer.activation_dtype  # type: ignore[assignment]
        device: torch.device = layer.matrix_device  # type: ignore[assignment]
        scheme = next(rule.scheme for rule in self.rules.values() if rule is not None)
        assert scheme is not None
        hardware: Hardware = layer.matrix_hardware  # type: ignore[assignment]
        scheme = scheme_at(self.config, scheme, int(columns))
        running = mode_of(self.config, scheme, hardware)
        if running.mode == "dequantized" or hardware.kind == "cpu":
            return DenseRunner(dense_method(self.config.dense), [], columns, dtype, device, rows)
        blank = blank_matrix(scheme, int(rows), int(columns), dtype, device)
        return MatricesRunner([of_mode(blank, running)])

    def _made(self, layer: nn.Module) -> Runner:
        """The runner of what was loaded, which is let go."""
        pieces: dict[int, _Piece] = layer.pieces  # type: ignore[assignment]
        rows, columns = layer.matrix_shape  # type: ignore[misc]
        dtype: torch.dtype = layer.activation_dtype  # type: ignore[assignment]
        device: torch.device = layer.matrix_device  # type: ignore[assignment]
        hardware: Hardware = layer.matrix_hardware  # type: ignore[assignment]
        matrices: list[Matrix] = []
        modes: list[Running | None] = []
        for target in sorted(pieces):
            piece = pieces.pop(target)
            matrix = piece.layout.matrix(piece.name, piece.tensors, piece.shard, piece.columns)
            if piece.order is not None:
                matrix = matrix.taken(piece.order.to(device))
            scheme = None if piece.rule is None else piece.rule.scheme
            # By the groups that this rank has: parts of the checkpoint's may be too small for a kernel.
            here = None if scheme is None else scheme_at(self.config, scheme, int(columns))
            mode = None if here is None else mode_of(self.config, here, hardware)
            if mode is not None and mode.mode == "W8A8" and _is_parted(matrix):
                _warn_of_parted_blocks(piece.shard.cols)
            matrices.append(matrix)
            modes.append(mode)
        lacking = int(rows) - sum(matrix.rows for matrix in matrices)
        if lacking:  # what pads a vocabulary over ranks
            matrices[-1] = matrices[-1].padded(lacking)
        return self._runner(matrices, modes, int(columns), dtype, device, hardware)

    def _runner(
        self,
        matrices: list[Matrix],
        modes: list[Running | None],
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        hardware: Hardware,
    ) -> Runner:
        expanded = [mode is None or mode.mode == "dequantized" for mode in modes]
        since: str | None = None
        if hardware.kind == "cpu":  # whose kernels take all or nothing
            if not any(expanded):
                try:
                    return PackedRunner(packable(matrices), columns)
                except Unpackable as error:
                    since = str(error)
            elif not all(expanded):
                since = "others are not quantized, or dequantized, with which they are multiplied as one"
            expanded = [True] * len(matrices)
        if all(expanded):
            runner = DenseRunner(dense_method(self.config.dense), matrices, columns, dtype, device)
            runner.expanded_since = since
            return runner
        kept = []
        for matrix, mode, dense in zip(matrices, modes, expanded, strict=True):
            if dense:
                matrix = DenseRunner.expand(matrix, dtype)
            elif mode is not None:
                matrix = of_mode(matrix, mode)
            kept.append(matrix.for_activations(dtype))
        return MatricesRunner([matrix.for_kernels() for matrix in join(kept)])

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _runner_of(layer).apply(x, bias)

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, act: GatedActivation
    ) -> torch.Tensor:
        return _runner_of(layer).apply_gated(x, bias, act)

    def takes_gates(self, layer: nn.Module, x: torch.Tensor) -> bool:
        return _runner_of(layer).takes_gates(x)

    def apply_to_gates(
        self, layer: nn.Module, gates: torch.Tensor, act: GatedActivation, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return _runner_of(layer).apply_to_gates(gates, act, bias)

    def apply_after(
        self,
        layer: nn.Module,
        norm: AddingNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        act: GatedActivation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _runner_of(layer).apply_after(norm, x, residual, bias, act)

    def _part_rules(self) -> list[Rule | None]:
        rules = list(self.rules.values())
        return rules[:-1] or rules

    def kept_bytes(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        rules = self._part_rules()
        if len(parts) != len(rules):
            rules = [rules[0]] * len(parts)
        rows = [(n, rule) for (n, _), rule in zip(parts, rules, strict=True)]
        return self._bytes(rows, columns, dtype, device)

    def product_memory(
        self, parts: Sequence[StoredRows], columns: int, dtype: torch.dtype, device: torch.device
    ) -> ProductMemory:
        hardware, rule = hardware_of(device), self._part_rules()[0]
        scheme = None if rule is None or rule.scheme is None else scheme_at(self.config, rule.scheme, columns)
        mode = "dequantized" if scheme is None else mode_of(self.config, scheme, hardware).mode
        if scheme is None or mode == "dequantized":
            return dense_method(self.config.dense).product_memory(parts, columns, dtype, device)
        if hardware.kind != "cpu":  # there rows of 8 bits are made by the norm or the activation before
            return ProductMemory(gate_copies=2, codes=1) if mode == "W8A8" else ProductMemory()
        return packed_product_memory([(sum(rows for rows, _ in parts), packed_format(scheme))], dtype)

    def kept_columns(self, columns: int, whole: int, device: torch.device) -> int:
        scheme = next((rule.scheme for rule in self._part_rules() if rule is not None), None)
        if scheme is None or not scheme.act_order or scheme.group_size is None or columns == whole:
            return columns
        if mode_of(self.config, scheme, hardware_of(device)).mode == "dequantized":
            return columns
        # Each group is filled up to a multiple of 32, on average by half of that.
        filled = columns + -(-whole // scheme.group_size) * LEAST_GROUP // 2
        return -(-filled // LEAST_GROUP) * LEAST_GROUP

    def _bytes(
        self,
        parts: Sequence[tuple[int, Rule | None]],
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> int:
        """Bytes of parts of so many rows each."""
        return sum(matrix_bytes(self.config, rule, rows, columns, dtype, device) for rows, rule in parts)


def matrix_bytes(
    config: QuantizationConfig,
    rule: Rule | None,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Bytes of so many rows and columns by a rule, as a device keeps them beside activations of `dtype`."""
    scheme = None if rule is None or rule.scheme is None else scheme_at(config, rule.scheme, columns)
    hardware = hardware_of(device)
    if scheme is None or mode_of(config, scheme, hardware).mode == "dequantized":
        return rows * columns * (2 if config.dense == "half" else dtype.itemsize)
    if hardware.kind == "cpu":
        return PackedRunner.bytes_of(scheme, rows, columns)
    blank = blank_matrix(scheme, rows, columns, dtype, torch.device("meta"))
    return sum(tensor.nbytes for tensor in blank.tensors.values())


def _is_parted(matrix: Matrix) -> bool:
    """Whether blocks of weights were parted, so that activations stay as they are."""
    return (
        isinstance(matrix, Matrix8)
        and matrix.activations is None
        and matrix.scale.dim() == 2
        and (matrix.weight.dtype is FP8)
    )


@functools.cache
def _warn_of_parted_blocks(columns: int) -> None:
    logger.warning(
        "some matrices of %d columns begin within a block of 128 x 128 weights on this rank: their "
        "activations are not quantized, which is more exact and slower; another tensor_parallel_size may "
        "part no blocks",
        columns,
    )


def of_mode(matrix: Matrix, running: Running) -> Matrix:
    """The matrix with activations as the mode has them."""
    if isinstance(matrix, Matrix8) and running.mode == "W8A16":
        return replace(matrix, activations=None, input_scale=None)
    return matrix


def _runner_of(layer: nn.Module) -> Runner:
    runner: Runner = layer.runner  # type: ignore[assignment]
    return runner
