"""The `quantization_config` of compressed-tensors (https://github.com/neuralmagic/compressed-tensors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.quantization.scheme import ActivationScheme, QuantizationConfig, Rule, WeightScheme

LAYOUTS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_BLOCK = [128, 128]
_ORDERS: dict[object, bool] = {None: False, False: False, "weight": False, "static": False}
_ORDERS |= {True: True, "group": True, "dynamic": True}
"""Whether groups are of columns that lie apart, by `actorder`."""


def names_of(given: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of names in an entry; nothing is none.

    Raises:
        ModelError: it is no list of words.
    """
    names = given.get(key) or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{where}: {key}={names!r} is no list of names: fetch the file again")
    return tuple(names)


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
    if not rules and given.get("kv_cache_scheme"):
        raise ModelError(
            f"{where}: kv_cache_scheme without config_groups is not supported: use the unquantized "
            "checkpoint with kv_cache_dtype"
        )
    if not rules:
        raise ModelError(f"{where}: quantization_config has no config_groups: fetch the file again")
    return QuantizationConfig(
        "compressed-tensors",
        rules,
        names_of(given, "ignore", where),
        kv_cache=_kv_cache(given.get("kv_cache_scheme"), where),
        source=where,
    )


def _rule(name: str, group: Mapping[str, Any], whole: str, where: str) -> Rule:
    targets = names_of(group, "targets", where)
    if not targets:
        raise ModelError(f"{where}: {name} of config_groups has no targets: fetch the file again")
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
    if layout == "pack-quantized" and scheme.activations is not None:
        raise ModelError(
            f"{where}: format {layout!r} with quantized activations ({name}) is not supported: use a "
            "checkpoint in 'int-quantized'"
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
    symmetric = bool(given.get("symmetric", True))
    if kind == "float" and not symmetric or kind != "float" and strategy == "block":
        how = "by block" if symmetric else "with zero points"
        raise ModelError(
            f"{where}: weights of {kind} {bits} {how} ({name}) are not supported: use FP8 for blocks, and "
            "integers for zero points"
        )
    computed = _activations(name, activations, where)
    if computed is not None:
        _check_product(name, computed, bits, kind, strategy, where)
    order = given.get("actorder")
    if not isinstance(order, (str, bool, type(None))) or order not in _ORDERS:
        raise ModelError(
            f"{where}: actorder={order!r} ({name}) is not supported: use a checkpoint with group or static"
        )
    return WeightScheme(
        kinds[bits, kind],  # type: ignore[arg-type]
        strategy,  # type: ignore[arg-type]
        group if strategy == "group" else None,
        block=(128, 128) if strategy == "block" else None,
        symmetric=symmetric,
        activations=computed,
        act_order=_ORDERS[order],
    )


def _check_product(
    name: str, activations: ActivationScheme, bits: int, kind: str, strategy: str, where: str
) -> None:
    """Raises ModelError: activations that are not multiplied with weights of that kind."""
    same = activations.kind == ("fp8" if kind == "float" else "int8")
    # Blocks of weights go with groups of activations, and nothing else does with either.
    blocks = (strategy == "block") == (activations.strategy == "group")
    if bits != 8 or strategy == "group" or not same or not blocks:
        raise ModelError(
            f"{where}: activations of {activations.kind} by {activations.strategy} with weights of {kind} "
            f"{bits} by {strategy} ({name}) are not supported: use a checkpoint of W4A16, W8A8, FP8_DYNAMIC, "
            "FP8 or FP8_BLOCK"
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
