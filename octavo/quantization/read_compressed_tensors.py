"""The `quantization_config` of compressed-tensors (https://github.com/neuralmagic/compressed-tensors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.quantization.scheme import ActivationScheme, QuantizationConfig, Rule, WeightScheme

LAYOUTS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_BLOCK = [128, 128]


def read_compressed_tensors(given: Mapping[str, Any], where: str) -> QuantizationConfig:
    """The schemes of an entry.

    Raises:
        ModelError: a format, strategy or number of bits that is not supported.
        TypeError, ValueError, AttributeError: an entry of the wrong kind.
    """
    whole = str(given.get("format", "dense"))
    sparsity = given.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ModelError(
            f"{where}: sparse weights ({sparsity['format']}) are not supported: use a dense checkpoint"
        )
    if given.get("transform_config"):
        raise ModelError(
            f"{where}: transform_config (rotations that the model computes) is not supported: use a "
            "checkpoint without it"
        )
    rules = tuple(
        _rule(name, group, whole, where) for name, group in (given.get("config_groups") or {}).items()
    )
    if not rules:
        raise ModelError(f"{where}: quantization_config has no config_groups: fetch the file again")
    return QuantizationConfig(
        "compressed-tensors",
        rules,
        tuple(str(name) for name in given.get("ignore") or ()),
        kv_cache=_kv_cache(given.get("kv_cache_scheme"), where),
        source=where,
    )


def _rule(name: str, group: Mapping[str, Any], whole: str, where: str) -> Rule:
    targets = tuple(str(target) for target in group["targets"])
    weights = group.get("weights")
    if weights is None:
        return Rule(targets, None)
    layout = str(group.get("format") or whole)
    if layout not in LAYOUTS:
        raise ModelError(
            f"{where}: format {layout!r} of {name} is not supported: use a checkpoint in {', '.join(LAYOUTS)}"
        )
    if group.get("output_activations"):
        raise ModelError(f"{where}: output_activations of {name} are not supported: use a checkpoint without")
    scheme = _weights(name, weights, group.get("input_activations"), where)
    if (scheme.kind == "int4" and layout != "pack-quantized") or (
        scheme.kind == "fp8" and layout == "pack-quantized"
    ):
        raise ModelError(
            f"{where}: format {layout!r} with weights of {scheme.kind} ({name}) is not supported: use a "
            "checkpoint with 4 bits in 'pack-quantized', FP8 in 'float-quantized'"
        )
    return Rule(targets, scheme, layout)


def _weights(
    name: str, given: Mapping[str, Any], activations: Mapping[str, Any] | None, where: str
) -> WeightScheme:
    bits, kind = given.get("num_bits", 8), str(given.get("type", "int"))
    kinds = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4"}
    if (bits, kind) not in kinds:
        raise ModelError(
            f"{where}: weights of {bits} bits of type {kind} ({name}) are not supported: use a checkpoint of "
            "int 4 or 8, or float 8"
        )
    if given.get("dynamic"):
        raise ModelError(f"{where}: dynamic weights ({name}) are not supported: fetch the file again")
    strategy, group = given.get("strategy"), given.get("group_size")
    if strategy is None:  # which older files leave to be concluded
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ModelError(
            f"{where}: strategy {strategy!r} ({name}) is not supported: use tensor, channel, group or block"
        )
    block = given.get("block_structure")
    if isinstance(block, str):  # "128x128", in older files
        block = [int(size) for size in block.split("x")]
    if strategy == "block" and list(block or []) != _BLOCK:
        raise ModelError(f"{where}: block_structure={block!r} ({name}) is not supported: use {_BLOCK}")
    if strategy == "group" and (not isinstance(group, int) or group < 1 or group % 8):
        raise ModelError(
            f"{where}: group_size={group!r} ({name}) is no multiple of 8: use groups of 32, 64 or 128"
        )
    computed = _activations(name, activations, where)
    if computed is not None and (kinds[bits, kind] == "int4" or strategy == "group"):
        raise ModelError(
            f"{where}: quantized activations with weights of int {bits} by {strategy} ({name}) are not "
            "supported: use a checkpoint of W4A16 or W8A8"
        )
    order = given.get("actorder")
    return WeightScheme(
        kinds[bits, kind],  # type: ignore[arg-type]
        strategy,  # type: ignore[arg-type]
        group if strategy == "group" else None,
        block=(128, 128) if strategy == "block" else None,
        symmetric=bool(given.get("symmetric", True)),
        activations=computed,
        act_order=order is True or order in ("group", "dynamic"),
    )


def _activations(name: str, given: Mapping[str, Any] | None, where: str) -> ActivationScheme | None:
    if given is None:
        return None
    bits, kind = given.get("num_bits", 8), str(given.get("type", "int"))
    if bits != 8 or kind not in ("int", "float"):
        raise ModelError(
            f"{where}: activations of {bits} bits of type {kind} ({name}) are not supported: use a "
            "checkpoint with int 8 or float 8"
        )
    dynamic = bool(given.get("dynamic", False))
    strategy = given.get("strategy") or ("token" if dynamic else "tensor")
    if not given.get("symmetric", True):
        raise ModelError(
            f"{where}: asymmetric activations ({name}) are not supported: use a checkpoint with symmetric "
            "ones"
        )
    if strategy not in ("token", "tensor", "group") or (strategy != "tensor" and not dynamic):
        raise ModelError(
            f"{where}: activations of strategy {strategy!r} ({name}), {'dynamic' if dynamic else 'static'}, "
            "are not supported: use dynamic ones per token, or static ones per tensor"
        )
    if strategy == "group" and given.get("group_size") != _BLOCK[1]:
        raise ModelError(
            f"{where}: activations in groups of {given.get('group_size')!r} ({name}) are not supported: "
            "use a checkpoint with groups of 128"
        )
    return ActivationScheme(
        "fp8" if kind == "float" else "int8",
        dynamic,
        # One scale per token is finer than one for all of them, and costs no more.
        "token" if dynamic and strategy == "tensor" else strategy,  # type: ignore[arg-type]
        _BLOCK[1] if strategy == "group" else None,
    )


def _kv_cache(given: Mapping[str, Any] | None, where: str) -> Any:
    if given is None:
        return None
    kind = {"float": "fp8", "int": "int8"}.get(str(given.get("type", "float")))
    if given.get("num_bits", 8) != 8 or kind is None:
        raise ModelError(
            f"{where}: kv_cache_scheme of {given.get('num_bits')} bits is not supported: use one of 8 bits"
        )
    return kind
