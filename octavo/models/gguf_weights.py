"""Weights of a GGUF file under Hugging Face's names and in its row order, one by one, decoded or kept as they
are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch

from octavo.errors import ModelError
from octavo.models.ahead import Job, run_ahead
from octavo.models.config import ModelConfig
from octavo.models.gguf_families import FAMILIES, TOP_NAMES, GGUFFamily
from octavo.models.gguf_file import GGUFFile, GGUFTensor
from octavo.models.gguf_quants import PLAIN, dequantize
from octavo.models.mapped_file import MappedFile
from octavo.models.targets import Targets, check_tensors
from octavo.quantization.gguf_blocks import quantized_matrix
from octavo.quantization.quantized_tensor import QuantizedTensor

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
    type where that is one of floats.

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

        def make() -> torch.Tensor:
            with files[tensor.path].reading(tensor.offset, tensor.nbytes) as raw:
                return decode(raw)

        def decode(raw: torch.Tensor) -> torch.Tensor:
            match = _QK_NAME.search(name)
            if match and heads:
                raw = _unpermute(raw, tensor.shape[0], heads[match[1]])
            if tensor.type_name in targets[name].encodings and len(tensor.shape) == 2:
                if tensor.type_name in PLAIN:
                    return dequantize(raw, tensor.type_name, tensor.shape, PLAIN[tensor.type_name], device)
                kept = quantized_matrix(tensor.type_name, raw, *tensor.shape)
                if kept is not None:
                    return QuantizedTensor.of(kept)
            offset = family.norm_offset if name.endswith("norm.weight") else 0.0
            try:
                if offset:
                    wide = dequantize(raw, tensor.type_name, tensor.shape, torch.float32, device)
                    return (wide - offset).to(dtype)
                return dequantize(raw, tensor.type_name, tensor.shape, dtype, device)
            except NotImplementedError:
                raise ModelError(
                    f"{file.path}: tensor {tensor.name!r} is stored as {tensor.type_name}, which cannot be "
                    "decoded: quantize the model to another type"
                ) from None

        return Job(name, math.prod(tensor.shape), make)

    jobs = [job(name) for name in sorted(names, key=lambda n: by_name[n].offset)]
    return sum(j.numel for j in jobs), run_ahead(jobs, device)


def _unpermute(raw: torch.Tensor, rows: int, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows, [pair, half] within a head, on whole encoded rows."""
    return raw.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(-1)
