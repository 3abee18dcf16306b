"""The tensors of bitsandbytes: 4 bits by a table (NF4, arXiv 2305.14314, and FP4), and LLM.int8() (arXiv
2208.07339) as weights alone, without its outliers."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from octavo.errors import ModelError
from octavo.kernels.reference_lowbit import pack_rows
from octavo.quantization.layout import (
    COLUMNS,
    ROWS,
    Layout,
    Pieces,
    group_axis,
    int8_dummy,
    int8_scale_dummy,
)
from octavo.quantization.matrices import Matrix, Matrix8, Nf4Matrix
from octavo.quantization.scheme import Rule
from octavo.quantization.shard import Shard
from octavo.quantization.stored_tensor import Axis, StoredTensor

_BLOCK = 64  # neighbouring weights, row after row, that share a scale
_NESTED = 256  # scales that share one, where they are quantized themselves
_BYTES = frozenset({torch.uint8})
_FLOAT32 = frozenset({torch.float32})


class Bits4Layout(Layout):
    """`weight` uint8 `[N K / 2, 1]`, the first of two codes in the upper half; `weight.absmax [N K / 64]`, in
    "nested" checkpoints itself in 8 bits; `weight.quant_map [16]`; a JSON object as bytes."""

    def __init__(self, rule: Rule):
        self.kind, _, nested = rule.layout.partition("_")
        self.nested = nested == "nested"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        scales = group_axis(_BLOCK)
        state = f"weight.quant_state.bitsandbytes__{self.kind}"
        out = {
            "weight": StoredTensor((ROWS, Axis("columns", 2)), _BYTES, dummy=_bytes_dummy),
            "weight.quant_map": StoredTensor((16,), _FLOAT32, numbers="finite", dummy=_table_dummy),
        }
        if self.nested:
            out |= {
                "weight.absmax": StoredTensor((ROWS, scales), _BYTES, dummy=_bytes_dummy),
                "weight.nested_absmax": StoredTensor(
                    (-(-rows * columns // _BLOCK // _NESTED),),
                    _FLOAT32,
                    numbers="magnitudes",
                    dummy=_absmax_dummy,
                ),
                "weight.nested_quant_map": StoredTensor(
                    (256,), _FLOAT32, numbers="finite", dummy=_table_dummy
                ),
            }
        else:
            out["weight.absmax"] = StoredTensor(
                (ROWS, scales), _FLOAT32, numbers="magnitudes", dummy=_absmax_dummy
            )
        optional = not self.nested
        return {**out, state: StoredTensor((0,), _BYTES, optional, dummy=_state_dummy, any_size=True)}

    def stored_shape(self, name: str, rows: int, columns: int) -> tuple[int, ...] | None:
        """The shape in the file, where it is not that of the axes."""
        return {"weight": (rows * columns // 2, 1), "weight.absmax": (rows * columns // _BLOCK,)}.get(name)

    def arranged(self, name: str, tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return tensor.reshape(rows, -1) if name in ("weight", "weight.absmax") else tensor

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        state = self._state(name, pieces)
        if state.get("blocksize", _BLOCK) != _BLOCK:
            raise ModelError(
                f"{name}: blocks of {state['blocksize']} weights are not supported: use blocksize=64"
            )
        packed, scales = pieces["weight"], pieces["weight.absmax"].float()
        if self.nested:
            scales = self._nested(name, pieces, state, shard, columns)
        codes = torch.stack((packed >> 4, packed & 15), 2).flatten(1)
        return Nf4Matrix(pack_rows(codes.T), scales.T.contiguous(), pieces["weight.quant_map"].float())

    def _state(self, name: str, pieces: Pieces) -> dict[str, Any]:
        raw = pieces.get(f"weight.quant_state.bitsandbytes__{self.kind}")
        if raw is None:
            return {}
        try:
            state = json.loads(bytes(raw.cpu().tolist()).decode())
            if not isinstance(state, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise ModelError(f"{name}: quant_state is no JSON ({error}): fetch the model again") from None
        return state

    def _nested(
        self, name: str, pieces: Pieces, state: dict[str, Any], shard: Shard, columns: int
    ) -> torch.Tensor:
        """Scales that are themselves codes of a table, times scales of blocks of them, plus an offset."""
        codes, outer = pieces["weight.absmax"], pieces["weight.nested_absmax"].flatten()
        offset = state.get("nested_offset")
        usual = state.get("nested_blocksize", _NESTED) == _NESTED
        if not usual or not isinstance(offset, (int, float)) or not math.isfinite(offset):
            raise ModelError(
                f"{name}: quant_state of nested_blocksize {state.get('nested_blocksize')}, nested_offset "
                f"{offset} is not supported: quantize with bitsandbytes' defaults"
            )
        width, group = columns // _BLOCK, shard.cols // codes.shape[1]
        rows = torch.arange(shard.row, shard.row + shard.rows, device=codes.device)
        # Of smaller groups than blocks where a rank's border parts blocks.
        cols = (shard.col + torch.arange(codes.shape[1], device=codes.device) * group) // _BLOCK
        block = (rows[:, None] * width + cols) // _NESTED
        return pieces["weight.nested_quant_map"][codes.long()] * outer[block] + offset


class Int8Layout(Layout):
    """`weight` int8 `[N, K]`, `SCB` float32 `[N]`: each row's largest magnitude."""

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor((ROWS, COLUMNS), frozenset({torch.int8}), dummy=int8_dummy),
            "SCB": StoredTensor(
                (ROWS,),
                _FLOAT32,
                numbers="magnitudes",
                dummy=lambda unit, std: int8_scale_dummy(unit, std) * 127,
            ),
            "weight_format": StoredTensor((), _BYTES, True, other_shapes=((1,),)),
        }

    def matrix(self, name: str, pieces: Pieces, shard: Shard, columns: int) -> Matrix:
        order = pieces.get("weight_format")
        if order is not None and int(order) != 0:
            raise ModelError(
                f"{name}: weight_format {int(order)} (tiles of a GPU) is not supported: save the model with "
                "row order (weight_format 0)"
            )
        return Matrix8(pieces["weight"], pieces["SCB"].float() / 127)


def _bytes_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    return (unit * 1e5).to(torch.int64).remainder(256).to(torch.uint8)


def _table_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    return torch.linspace(-1, 1, len(unit), device=unit.device)


def _state_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    state = json.dumps({"blocksize": _BLOCK, "nested_blocksize": _NESTED, "nested_offset": 2 * std})
    return torch.tensor(list(state.encode()), dtype=torch.uint8, device=unit.device)


def _absmax_dummy(unit: torch.Tensor, std: float) -> torch.Tensor:
    return torch.full_like(unit, std * 1.65)
