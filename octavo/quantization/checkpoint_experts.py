"""Experts of quantized checkpoints: each expert's matrices in the forms of `checkpoint_method`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from octavo.kernels import reference_moe
from octavo.quantization import experts_method
from octavo.quantization.capability import Hardware, Running
from octavo.quantization.checkpoint_method import (
    layout_of,
    matrix_bytes,
    mode_of,
    of_mode,
    scheme_at,
)
from octavo.quantization.checkpoint_runners import MatricesRunner, PackedRunner, Runner, Unpackable, packable
from octavo.quantization.experts_method import ExpertShard, ExpertsMethod, UnquantizedExpertsMethod
from octavo.quantization.local_hardware import hardware_of
from octavo.quantization.matrices import DenseMatrix, Matrix, blank_matrix, join
from octavo.quantization.scheme import QuantizationConfig, Rule
from octavo.quantization.shard import Region, Shard
from octavo.quantization.stored_tensor import StoredTensor

_PLAIN = UnquantizedExpertsMethod()


def checkpoint_experts(
    config: QuantizationConfig, names: Mapping[experts_method.Matrix, str]
) -> ExpertsMethod:
    """The method of experts whose first one's matrices a checkpoint has under `names`."""
    rules = {matrix: config.rule_for(name) for matrix, name in names.items()}
    if all(rule is None for rule in rules.values()):
        return _PLAIN
    return CheckpointExperts(config, names, rules)


class CheckpointExperts(ExpertsMethod):
    """Quantized experts. Each matrix is made as soon as its tensors are there; where the device has no
    kernels for them they are expanded into the parameters of `UnquantizedExpertsMethod`.

    Otherwise the layer has `w13` and `w2`, a `Runner` for each expert.

    Args:
        config: of the model.
        names: what the checkpoint calls the first expert's matrices.
        rules: of each matrix.
    """

    def __init__(
        self,
        config: QuantizationConfig,
        names: Mapping[experts_method.Matrix, str],
        rules: Mapping[experts_method.Matrix, Rule | None],
    ):
        self.config = config
        self.names = names
        self.rules = rules
        self.layouts = {matrix: layout_of(config, rule) for matrix, rule in rules.items()}
        self.name = config.format

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layer.expert_pieces = {}  # type: ignore[assignment]
        layer.expert_tensors = {}  # type: ignore[assignment]
        layer.expert_matrices = {}  # type: ignore[assignment]
        layer.experts_device = device  # type: ignore[assignment]
        layer.experts_dtype = dtype  # type: ignore[assignment]
        layer.sizes = (num_experts, hidden_size, inner_size)  # type: ignore[assignment]
        hardware = hardware_of(device)
        expanded = self._expands(hardware)
        layer.experts_hardware = hardware  # type: ignore[assignment]
        layer.experts_expanded = expanded  # type: ignore[assignment]
        if device.type == "meta" and not expanded:  # sizes alone are asked for
            self._blank(layer)
        if expanded:
            _PLAIN.create_weights(layer, num_experts, hidden_size, inner_size, dtype, device)

    def _blank(self, layer: nn.Module) -> None:
        """Buffers of the sizes that the experts will take."""
        count, hidden, inner = (int(size) for size in layer.sizes)  # type: ignore[union-attr]
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        dtype: torch.dtype = layer.experts_dtype  # type: ignore[assignment]
        device: torch.device = layer.experts_device  # type: ignore[assignment]
        for matrix, mode in zip(self.rules, self._modes(layer.experts_hardware), strict=True):  # type: ignore[arg-type]
            rows, columns = sizes[matrix]
            rule = self.rules[matrix]
            if rule is None or rule.scheme is None or mode is None or mode.mode == "dequantized":
                blank: Matrix = DenseMatrix(torch.empty(count * rows, columns, dtype=dtype, device=device))
            else:
                scheme = scheme_at(self.config, rule.scheme, columns)
                blank = blank_matrix(scheme, count * rows, columns, dtype, device)
            for name, tensor in blank.tensors.items():
                layer.register_buffer(f"{matrix}_{name}", tensor, persistent=False)

    def _modes(self, hardware: Hardware) -> list[Running | None]:
        schemes = [None if rule is None else rule.scheme for rule in self.rules.values()]
        return [None if scheme is None else mode_of(self.config, scheme, hardware) for scheme in schemes]

    def _expands(self, hardware: Hardware) -> bool:
        """Whether experts are dequantized while they are loaded."""
        modes = self._modes(hardware)
        if hardware.kind == "cpu":  # whose kernels take all or nothing
            return any(mode is None or mode.mode == "dequantized" for mode in modes)
        return all(mode is None or mode.mode == "dequantized" for mode in modes)

    def kept_bytes(
        self, num_experts: int, hidden_size: int, inner_size: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        if self._expands(hardware_of(device)):
            return super().kept_bytes(num_experts, hidden_size, inner_size, dtype, device)
        sizes = {"gate": (inner_size, hidden_size), "up": (inner_size, hidden_size)}
        sizes["down"] = (hidden_size, inner_size)
        one = sum(
            matrix_bytes(self.config, rule, *sizes[matrix], dtype, device)
            for matrix, rule in self.rules.items()
        )
        return num_experts * one

    def checkpoint_tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        stored = self.stored("gate", out_features, in_features)
        return {key: tensor.full_shape for key, tensor in stored.items()}

    def stored(
        self, matrix: experts_method.Matrix, out_features: int, in_features: int
    ) -> dict[str, StoredTensor]:
        layout, out = self.layouts[matrix], {}
        for key, tensor in layout.tensors(out_features, in_features).items():
            tensor.check(f"{self.names[matrix]}.{key}", out_features, in_features)
            shape = layout.stored_shape(key, out_features, in_features)
            out[key] = replace(tensor, axes=shape or tensor.shape(out_features, in_features))
        return out

    def region(
        self,
        matrix: experts_method.Matrix,
        name: str,
        out_features: int,
        in_features: int,
        shard: ExpertShard,
    ) -> Region | None:
        stored = self.layouts[matrix].tensors(out_features, in_features)[name]
        piece = _shard_of(matrix, out_features, in_features, shard)
        return stored.region(f"{self.names[matrix]}.{name}", out_features, in_features, piece)

    def load_shard(
        self,
        layer: nn.Module,
        name: str,
        matrix: experts_method.Matrix,
        expert: int | slice,
        tensor: torch.Tensor,
        shard: ExpertShard,
    ) -> None:
        if isinstance(expert, slice):
            for i, one in enumerate(tensor):
                self.load_shard(layer, name, matrix, i, one, shard)
            return
        _, hidden, _ = layer.sizes  # type: ignore[misc]
        rows, columns = (int(hidden), shard.total) if matrix == "down" else (shard.total, int(hidden))
        piece = _shard_of(matrix, rows, columns, shard)
        layout = self.layouts[matrix]
        tensors = layout.tensors(rows, columns)
        full = self.names[matrix].replace(".0.", f".{shard.first_expert + expert}.") + f".{name}"
        view = tensors[name].cut(full, layout.arranged(name, tensor, rows, columns), piece)
        device: torch.device = layer.experts_device  # type: ignore[assignment]
        kept = layout.kept(full, name, view, device)
        if name in kept:
            tensors[name].check_numbers(full, kept[name])
        pieces: dict[tuple[int, str], dict[str, torch.Tensor]] = layer.expert_pieces  # type: ignore[assignment]
        mine = pieces.setdefault((expert, matrix), {})
        mine |= kept
        seen: dict[tuple[int, str], set[str]] = layer.expert_tensors  # type: ignore[assignment]
        given = seen.setdefault((expert, matrix), set())
        given.add(name)
        if tensors[name].optional:  # it may come after all that the matrix was made of
            return
        if all(key in given for key, tensor in tensors.items() if not tensor.optional):
            made = layout.matrix(full.rpartition(".")[0], mine, piece, columns)
            self._take(layer, matrix, expert, made, shard)
            mine.clear()

    def _take(
        self,
        layer: nn.Module,
        matrix: experts_method.Matrix,
        expert: int,
        made: Matrix,
        shard: ExpertShard,
    ) -> None:
        hardware: Hardware = layer.experts_hardware  # type: ignore[assignment]
        dtype: torch.dtype = layer.experts_dtype  # type: ignore[assignment]
        if _expanded(layer):
            local = ExpertShard(0, shard.size, shard.size)
            _PLAIN.load_shard(layer, "weight", matrix, expert, made.dequantize(), local)
            return
        rule = self.rules[matrix]
        if rule is None or rule.scheme is None:
            made = made.for_activations(dtype)
        else:
            running = mode_of(self.config, rule.scheme, hardware)
            if running.mode == "dequantized":
                made = DenseMatrix(made.dequantize().to(dtype))
            else:
                made = of_mode(made, running).for_activations(dtype)
        found: dict[tuple[int, str], Matrix] = layer.expert_matrices  # type: ignore[assignment]
        found[expert, matrix] = made

    def process_after_load(self, layer: nn.Module) -> None:
        hardware: Hardware = layer.experts_hardware  # type: ignore[assignment]
        found: dict[tuple[int, str], Matrix] = layer.expert_matrices  # type: ignore[assignment]
        layer.expert_pieces = {}  # type: ignore[assignment]  # what was not needed
        if _expanded(layer) or not found:
            return
        count, hidden, inner = (int(size) for size in layer.sizes)  # type: ignore[union-attr]
        w13 = [[found.pop((i, "gate")), found.pop((i, "up"))] for i in range(count)]
        w2 = [[found.pop((i, "down"))] for i in range(count)]
        layer.w13 = self._runners(w13, hidden, hardware)  # type: ignore[assignment]
        layer.w2 = self._runners(w2, inner, hardware)  # type: ignore[assignment]
        for name, runners in (("w13", layer.w13), ("w2", layer.w2)):
            holder = nn.Module()
            for i, runner in enumerate(runners):  # type: ignore[arg-type]
                inner_module = nn.Module()
                runner.register(inner_module)
                holder.add_module(str(i), inner_module)
            layer.add_module(f"{name}_memory", holder)

    def _runners(
        self, matrices: Sequence[Sequence[Matrix]], columns: int, hardware: Hardware
    ) -> list[Runner]:
        if hardware.kind != "cpu":
            return [MatricesRunner([m.for_kernels() for m in join(parts)]) for parts in matrices]
        out: list[Runner] = []
        for parts in matrices:
            try:
                out.append(PackedRunner(packable(parts), columns))
            except Unpackable as error:
                runner = MatricesRunner(join([DenseMatrix(part.dequantize()) for part in parts]))
                runner.expanded_since = str(error)
                out.append(runner)
        return out

    def recordable(self, layer: nn.Module) -> bool:
        return _expanded(layer)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        if _expanded(layer):
            return _PLAIN.apply(layer, x, weights, experts)
        w13: Any = layer.w13
        w2: Any = layer.w2
        return reference_moe.experts(x, w13, w2, weights, experts, _run)


def _shard_of(matrix: experts_method.Matrix, rows: int, columns: int, shard: ExpertShard) -> Shard:
    (row, col), (num_rows, cols) = experts_method.piece_of(matrix, rows, columns, shard)
    return Shard(0, row, num_rows, col, cols)


def _expanded(layer: nn.Module) -> bool:
    """Whether the layer's experts are dequantized while they are loaded."""
    expanded: bool = layer.experts_expanded  # type: ignore[assignment]
    return expanded


def _run(x: torch.Tensor, runner: Any, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = runner.apply(x, bias)
    return out
