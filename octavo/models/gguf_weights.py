"""Weights of a GGUF file under Hugging Face's names and in its row order, one by one, decoded or kept as they
are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import torch

from octavo.errors import ModelError
from octavo.kernels.reference_quant import QuantizedMatrix
from octavo.models.ahead import Job, run_ahead
from octavo.models.config import ModelConfig
from octavo.models.gguf_families import FAMILIES, TOP_NAMES, GGUFFamily
from octavo.models.gguf_file import GGUFFile, GGUFTensor
from octavo.models.gguf_quants import PLAIN, dequantize
from octavo.models.mapped_file import MappedFile
from octavo.models.targets import Targets, check_tensors
from octavo.quantization.gguf_blocks import ENCODINGS, is_finite, quantized_matrix
from octavo.quantization.quantized_tensor import QuantizedTensor
from octavo.quantization.shard import Region

_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")
_QK_NAME = re.compile(r"self_attn\.([qk])_proj\.")
# Rotary frequencies: part of the config here (gguf_config), not weights.
_ROTARY = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight")


def hf_name(name: str, family: GGUFFamily) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None if it has none in this family."""
    if match := _LAYER_NAME.fullmatch(name):
        layer, stem, expert, kind = match.groups()
        if whole := family.names.get(f"{stem}.{kind}"):
            return f"model.layers.{layer}.{whole}"
        part = family.layer_name(stem if expert is None else f"{stem}.#")
        return f"model.layers.{layer}.{part.replace('#', expert or '')}.{kind}" if part else None
    stem, _, kind = name.rpartition(".")
    return f"{TOP_NAMES[stem]}.{kind}" if stem in TOP_NAMES else None


def named_tensors(file: GGUFFile, config: ModelConfig) -> dict[str, GGUFTensor]:
    """The tensors that are loaded, by their Hugging Face names.

    Where a tied model's file stores its one matrix twice, the copy of more bits serves for both ends.

    Raises:
        ModelError: a tensor that the family doesn't know.
    """
    family = FAMILIES[file.architecture]
    by_name: dict[str, GGUFTensor] = {}
    for tensor in file.tensors.values():
        if _ROTARY.fullmatch(tensor.name):
            continue
        name = hf_name(tensor.name, family)
        if name is None:
            raise ModelError(
                f"{file.path}: tensor {tensor.name!r} has no place in {config.architecture}: "
                "use a file of a supported kind"
            )
        by_name[name] = tensor
    if config.tie_word_embeddings and (output := by_name.pop("lm_head.weight", None)) is not None:
        if output.nbytes > by_name["model.embed_tokens.weight"].nbytes:
            by_name["model.embed_tokens.weight"] = output
    return by_name


def gguf_weights(
    file: GGUFFile, config: ModelConfig, targets: Targets, dtype: torch.dtype, device: torch.device
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Total elements, and the weights one by one in `dtype` on `device`.

    A matrix in one of the encodings that its target takes comes as a `QuantizedTensor` instead, or in its own
    type where that is one of floats. Rows that no region of a target takes are neither read nor decoded: they
    hold anything.

    Raises:
        ModelError: missing, misshapen or unknown tensors, or an encoding that cannot be decoded.
    """
    by_name = named_tensors(file, config)
    family = FAMILIES[file.architecture]
    shapes = {name: tensor.shape for name, tensor in by_name.items()}
    names = check_tensors(shapes, targets, file.path, config.architecture)
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if family.permuted else {}

    files = {part.path: MappedFile(part.path, part.size) for part in file.parts}

    def job(name: str) -> Job:
        tensor = by_name[name]
        match = _QK_NAME.search(name)
        num_heads = heads[match[1]] if match and heads else 0
        rows = _rows_of(targets[name].regions, tensor.shape, tensor.shape[0] // num_heads if num_heads else 1)
        shape = (len(rows), *tensor.shape[1:])

        def make() -> torch.Tensor:
            if targets[name].regions == ():  # passed over
                return torch.empty(tensor.shape, dtype=dtype, device="meta")
            per_row = tensor.nbytes // tensor.shape[0]
            begin = tensor.offset + rows.start * per_row
            with files[tensor.path].reading(begin, len(rows) * per_row) as raw:
                return _placed(decode(raw), rows, tensor.shape)

        def decode(raw: torch.Tensor) -> torch.Tensor:
            if num_heads:
                raw = _unpermute(raw, shape[0], num_heads * shape[0] // tensor.shape[0])
            if tensor.type_name in targets[name].encodings and len(shape) == 2:
                if tensor.type_name in PLAIN:
                    return dequantize(raw, tensor.type_name, shape, PLAIN[tensor.type_name], device)
                kept = quantized_matrix(tensor.type_name, raw, *shape)
                if kept is not None:
                    return QuantizedTensor.of(kept)
            encoding = ENCODINGS.get(tensor.type_name)
            if encoding is not None and not is_finite(encoding, raw):
                raise ModelError(
                    f"{file.path}: tensor {tensor.name!r} has a scale that is not finite: the file is "
                    "corrupt, fetch it again"
                )
            offset = family.norm_offset if name.endswith("norm.weight") else 0.0
            try:
                if offset:
                    wide = dequantize(raw, tensor.type_name, shape, torch.float32, device)
                    return (wide - offset).to(dtype)
                return dequantize(raw, tensor.type_name, shape, dtype, device)
            except NotImplementedError:
                raise ModelError(
                    f"{file.path}: tensor {tensor.name!r} is stored as {tensor.type_name}, which cannot be "
                    "decoded: quantize the model to another type"
                ) from None

        return Job(name, math.prod(shape), make)

    jobs = [job(name) for name in sorted(names, key=lambda n: by_name[n].offset)]
    return sum(j.numel for j in jobs), run_ahead(jobs, device)


def _rows_of(regions: Sequence[Region] | None, shape: tuple[int, ...], multiple: int) -> range:
    """The rows (entries of the first dimension) that are read for regions, without gaps; all rows where
    borders are no multiples."""
    whole = range(shape[0])
    if not regions or not shape[0] or any(region.shape != shape for region in regions):
        return whole
    first = min(region.first[0] for region in regions)
    last = max(region.first[0] + region.size[0] for region in regions)
    return whole if first % multiple or last % multiple else range(first, last)


def _placed(part: torch.Tensor, rows: range, shape: tuple[int, ...]) -> torch.Tensor:
    """Some rows of a tensor of that shape, at their places in one whose other rows hold anything (on a CPU,
    whatever memory nobody touched, which is none)."""
    if len(rows) == shape[0]:
        return part

    def place(values: torch.Tensor) -> torch.Tensor:
        out = torch.empty((shape[0], *values.shape[1:]), dtype=values.dtype, device=values.device)
        out[rows.start : rows.stop] = values
        return out

    if isinstance(part, QuantizedTensor):
        m = part.matrix
        minimum = None if m.minimum is None else place(m.minimum)
        return QuantizedTensor.of(QuantizedMatrix(m.format, place(m.q), place(m.scale), minimum))
    return place(part)


def _unpermute(raw: torch.Tensor, rows: int, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows, [pair, half] within a head, on whole encoded rows."""
    return raw.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(-1)
