"""Which tensors of a checkpoint are quantized, and what they become: known before the first is read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octavo.errors import ConfigError, ModelError
from octavo.models.loader import load_model_config
from octavo.models.loading import build_model, load_targets
from octavo.models.locate import ModelSource
from octavo.models.quantized import checkpoint_quantization
from octavo.models.safetensors_file import SafetensorsHeader, list_files, read_header
from octavo.models.targets import ignored
from octavo.models.weights import TORCH_DTYPES
from octavo.quantization.compress.safetensors_writer import Entry
from octavo.quantization.online import UNTOUCHED
from octavo.quantization.scheme import LINEAR, QuantizationConfig, Rule
from octavo.quantization.stored_tensor import FLOATS

_HEAD = "lm_head"


@dataclass(frozen=True)
class Work:
    """What is to be done.

    Attributes:
        config: the schemes, with what is left alone among `ignore`.
        headers: of the source's files.
        layers: the rule of each layer that is quantized, by its name in the checkpoint.
        ignore: full names of the linear layers that are not.
        written: of each file the tensors that it will hold.
    """

    config: QuantizationConfig
    headers: list[SafetensorsHeader]
    layers: dict[str, Rule]
    ignore: list[str]
    written: dict[Path, dict[str, Entry]]


def plan_work(source: ModelSource, config: QuantizationConfig) -> Work:
    """The work on a model.

    Args:
        source: the model.
        config: of a recipe.

    Raises:
        ConfigError: a recipe that does not fit the model.
        ModelError: a model that cannot be quantized, or a checkpoint that is not whole.
    """
    if source.kind == "gguf":
        raise ModelError(
            f"{source.name} is a GGUF file, which cannot be quantized by a recipe: name the folder of the "
            "unquantized model (or load the file with --quantization)"
        )
    model = load_model_config(source)
    if (found := checkpoint_quantization(source, model, "auto")) is not None:
        raise ModelError(
            f"{source.name} is quantized already, by {found.format}: name the folder of the unquantized model"
        )
    if model.implementation != "octavo":
        raise ModelError(
            f"{source.name}: {model.architecture} is run by Transformers' code, for which no quantized "
            "checkpoint is made: load it with --quantization instead"
        )
    headers = [read_header(path) for path in list_files(source.path)]
    if not headers:
        raise ModelError(f"{source.path}: no safetensors file: convert the weights to safetensors first")
    stored = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    matrices = [
        n.removesuffix(".weight") for n, t in stored.items() if n.endswith(".weight") and len(t.shape) == 2
    ]
    tied = f"{_HEAD}.weight" not in stored
    _check_names(config, [*matrices, *([_HEAD] if tied else [])])
    config = replace(config, ignore=(*config.ignore, *UNTOUCHED[1:]))
    if tied and config.rule_for(_HEAD) is not None:
        raise ConfigError(
            f"recipe: {_HEAD} has no matrix of its own in {source.name}, but the embedding's: "
            f"add {_HEAD} to ignore"
        )
    shapes = build_model(model, dtype=torch.float32, device="meta", quantization=config)
    targets = load_targets(shapes)
    layers: dict[str, Rule] = {}
    written: dict[Path, dict[str, Entry]] = {}
    for header in headers:
        entries = written.setdefault(header.path, {})
        for name, tensor in header.tensors.items():
            layer, dtype = name.removesuffix(".weight"), TORCH_DTYPES.get(tensor.dtype)
            if dtype is None:
                raise ModelError(
                    f"{header.path}: tensor {name!r} has type {tensor.dtype}, which is not supported: use a "
                    "checkpoint in F32, BF16 or F16"
                )
            marks = {
                key: f"{layer}.{key}" for key in ("weight_packed", "weight_scale", "weight_shape", "weight")
            }
            rule = config.rule_for(layer) if marks["weight_scale"] in targets and layer != name else None
            if rule is None:
                if name not in targets and not ignored(name, targets):
                    raise ModelError(
                        f"{header.path}: tensor {name!r} cannot be quantized as the recipe asks: use a "
                        "checkpoint that holds each matrix apart, or add it to ignore"
                    )
                entries[name] = Entry(dtype, tensor.shape)
                continue
            if dtype not in FLOATS:
                raise ModelError(
                    f"{header.path}: tensor {name!r} has type {tensor.dtype}: name the unquantized checkpoint"
                )
            _check_groups(layer, rule, tensor.shape[1])
            layers[layer] = rule
            entries |= _entries(layer, rule, tensor.shape, dtype, targets)
    if not layers:
        raise ConfigError("recipe: targets match no layer of the model, or ignore all of them: correct them")
    _check_whole(source, stored, layers, targets, model.architecture)
    ignore = [layer for layer in matrices if layer not in layers and not layer.endswith("embed_tokens")]
    return Work(config, headers, layers, [*ignore, _HEAD] if tied else ignore, written)


def _entries(
    layer: str, rule: Rule, shape: tuple[int, ...], dtype: torch.dtype, targets: object
) -> dict[str, Entry]:
    """The tensors of a layer, in the shapes that the loader asks for."""
    assert rule.scheme is not None
    wanted = {key: targets[f"{layer}.{key}"].shape for key in _keys(rule)}  # type: ignore[index]
    kinds = {
        "weight": torch.int8 if rule.scheme.kind == "int8" else torch.float8_e4m3fn,
        "weight_packed": torch.int32,
        "weight_scale": dtype,
        "weight_shape": torch.int64,
    }
    return {f"{layer}.{key}": Entry(kinds[key], tuple(found)) for key, found in wanted.items()}


def _check_groups(layer: str, rule: Rule, columns: int) -> None:
    """Raises ConfigError: activations in groups that other programs cannot cut a row of this length into."""
    activations = rule.scheme.activations if rule.scheme is not None else None
    size = None if activations is None else activations.group_size
    if size is not None and columns % size:
        raise ConfigError(
            f"recipe: {layer} has {columns} columns, which are no groups of {size}, as FP8_BLOCK has for "
            "activations: use FP8_DYNAMIC, or add the layer to ignore"
        )


def _keys(rule: Rule) -> tuple[str, ...]:
    packed = rule.layout == "pack-quantized"
    return ("weight_packed", "weight_scale", "weight_shape") if packed else ("weight", "weight_scale")


def _check_whole(
    source: ModelSource, stored: Iterable[str], layers: dict[str, Rule], targets: object, architecture: str
) -> None:
    """Raises ModelError: what will be written lacks a tensor of the model."""
    from octavo.models.targets import missing

    names = [name for name in stored if name.removesuffix(".weight") not in layers]
    names += [f"{layer}.{key}" for layer, rule in layers.items() for key in _keys(rule)]
    lacking = missing([name for name in names if name in targets], targets)  # type: ignore[operator, arg-type]
    if lacking:
        raise ModelError(
            f"{source.path}: tensor {lacking[0]!r} of {architecture} is missing: fetch the model again, "
            "or check its config"
        )


def _check_names(config: QuantizationConfig, layers: list[str]) -> None:
    """Raises ConfigError: a full name, or a pattern among targets, that matches no layer."""
    words = [(what, word) for rule in config.rules for what, word in (("targets", w) for w in rule.targets)]
    words += [("ignore", word) for word in config.ignore]
    for what, word in words:
        if word == LINEAR or word in layers:
            continue
        if word.startswith("re:"):
            pattern = re.compile(word.removeprefix("re:"))
            # A pattern of what is left alone may be meant for other models as well.
            if what == "ignore" or any(pattern.match(layer) for layer in layers):
                continue
            raise ConfigError(f"recipe: {what}: {word!r} matches no layer of the model: correct it")
        near = difflib.get_close_matches(word, [LINEAR, *layers], 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"name a layer such as {layers[0]}, or {LINEAR}"
        raise ConfigError(f"recipe: {what}: {word!r} is no layer of the model: {hint}")
