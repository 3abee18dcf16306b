"""What a checkpoint's config says of its quantization, read into a `QuantizationConfig`.

Formats: compressed-tensors (see `read_compressed_tensors`), AutoGPTQ's and GPTQModel's, AutoAWQ's, "fp8"
(DeepSeek's blocks, and AutoFP8's scales per tensor), bitsandbytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import ModelError
from octavo.quantization.read_compressed_tensors import names_of, read_compressed_tensors
from octavo.quantization.scheme import (
    LINEAR,
    ActivationScheme,
    QuantizationConfig,
    Rule,
    WeightScheme,
)

# Older checkpoints of GPTQ and AWQ have no entry in config.json, but a file of their own.
SIDE_FILES = ("quantize_config.json", "quant_config.json")
# What is not quantized where a format does not say: the output head, and routers of experts.
_UNNAMED = ("lm_head", r"re:.*\.(gate|router)$")
# The tensor by which a checkpoint of a format shows that a layer is quantized.
_MARKS = {
    "gptq": (".qweight",),
    "awq": (".qweight",),
    "fp8": (".weight_scale_inv", ".weight_scale"),
    "bitsandbytes": (".weight.absmax", ".SCB"),
}


def read_quantization(raw: Mapping[str, Any], where: str) -> QuantizationConfig | None:
    """The quantization that a config.json states; None: there is none.

    Args:
        raw: the object.
        where: the file, for messages.

    Raises:
        ModelError: a method, version or number of bits that is not supported, or a malformed entry.
    """
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            given = part.get(key)
            if given:
                if not isinstance(given, dict):
                    raise ModelError(
                        f"{where}: quantization by {key}={given!r} is not supported: use an unquantized "
                        "checkpoint or a GGUF file"
                    )
                return read_quantization_entry(given, where)
    return None


def read_quantization_entry(given: dict[str, Any], where: str) -> QuantizationConfig:
    """As `read_quantization`, of the entry itself, or of what a file of `SIDE_FILES` holds."""
    method = given.get("quant_method")
    if method is None:  # side files of the first versions
        method = "awq" if "w_bit" in given or "zero_point" in given else "gptq" if "bits" in given else None
    read = _METHODS.get(str(method).lower())
    if read is None:
        raise ModelError(
            f"{where}: quantization by {method!r} is not supported: use a checkpoint of "
            f"{', '.join(_METHODS)}, an unquantized one, or a GGUF file"
        )
    try:
        config = read(given, where)
        for rule in config.rules:
            _check_patterns(rule.targets, where)
        _check_patterns(config.ignore, where)
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # a value of the wrong kind
        raise ModelError(f"{where}: malformed quantization_config ({error}): fetch the file again") from None
    return config


def limited_to(config: QuantizationConfig, names: Iterable[str]) -> QuantizationConfig:
    """The config for a checkpoint with tensors of these names, which say what is quantized where the format's
    entry does not."""
    marks = _MARKS.get(config.format)
    if marks is None:
        return config
    layers = {name.removesuffix(mark) for name in names for mark in marks if name.endswith(mark)}
    rules = []
    for rule in config.rules:
        mine = tuple(sorted(layer for layer in layers if config.rule_for(layer) is rule))
        rules.append(replace(rule, targets=mine))
    return replace(config, rules=tuple(rules), ignore=())


def _check_patterns(targets: tuple[str, ...], where: str) -> None:
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                raise ModelError(
                    f"{where}: {target!r} is no regular expression ({error}): fetch the file again"
                ) from None


def _number(given: Mapping[str, Any], keys: tuple[str, ...], where: str, default: int | None = None) -> int:
    for key in keys:
        value = given.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ModelError(f"{where}: {key}={value!r} is no integer: fetch the file again")
            return value
    if default is None:
        raise ModelError(f"{where}: quantization_config has no {keys[0]}: fetch the file again")
    return default


def _group(size: int, where: str) -> int | None:
    if size == -1:
        return None
    if size < 1 or size % 8:
        raise ModelError(
            f"{where}: group_size={size} is no multiple of 8: use a checkpoint with groups of 32, 64 or 128"
        )
    return size


def _affine(bits: int, group: int | None, symmetric: bool, act_order: bool, where: str) -> WeightScheme:
    if bits not in (4, 8):
        raise ModelError(
            f"{where}: weights of {bits} bits are not supported: use a checkpoint of 4 or 8 bits"
        )
    kind = "int4" if bits == 4 else "int8"
    strategy = "channel" if group is None else "group"
    return WeightScheme(kind, strategy, group, symmetric=symmetric, act_order=act_order)  # type: ignore[arg-type]


def _gptq(given: Mapping[str, Any], where: str) -> QuantizationConfig:
    layout = str(given.get("checkpoint_format") or given.get("format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"{where}: checkpoint_format={layout!r} is not supported: use a checkpoint in 'gptq' or 'gptq_v2'"
        )
    if str(given.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        raise ModelError(
            f"{where}: pack_dtype={given['pack_dtype']!r} is not supported: use a checkpoint packed in int32"
        )

    def rule(own: Mapping[str, Any], targets: tuple[str, ...]) -> Rule:
        scheme = _affine(
            _number(own, ("bits",), where),
            _group(_number(own, ("group_size",), where, -1), where),
            bool(own.get("sym", True)),
            bool(own.get("desc_act", False)),
            where,
        )
        return Rule(targets, scheme, layout)

    ignore: list[str] = [] if given.get("lm_head") else ["lm_head"]
    rules = []
    for pattern, override in (given.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            ignore.append(f"re:{pattern.removeprefix('-:')}")
        else:
            rules.append(rule({**given, **override}, (f"re:{pattern.removeprefix('+:')}",)))
    everything = (LINEAR,)
    return QuantizationConfig(
        "gptq", (*rules, rule(given, everything)), (*ignore, *_UNNAMED[1:]), source=where
    )


def _awq(given: Mapping[str, Any], where: str) -> QuantizationConfig:
    version = str(given.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(
            f"{where}: AWQ's version {version!r} is not supported: use a checkpoint of version 'gemm'"
        )
    bits = _number(given, ("bits", "w_bit"), where)
    if bits != 4:
        raise ModelError(f"{where}: AWQ of {bits} bits is not supported: use a checkpoint of 4 bits")
    group = _group(_number(given, ("group_size", "q_group_size"), where, -1), where)
    if not given.get("zero_point", True):
        raise ModelError(f"{where}: AWQ with zero_point=false is not supported: use a checkpoint with it")
    scheme = _affine(bits, group, False, False, where)
    rule = Rule((LINEAR,), scheme, "gemm")
    return QuantizationConfig("awq", (rule,), _unconverted(given, where), source=where)


def _unconverted(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Layers that a list leaves out: those whose names contain an entry, as Transformers takes it."""
    keys = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
    named = [name for key in keys for name in names_of(given, key, where)]
    return (*_UNNAMED, *(rf"re:.*(^|\.){re.escape(name)}(\.|$)" for name in named))


def _fp8(given: Mapping[str, Any], where: str) -> QuantizationConfig:
    fmt = str(given.get("fmt", "e4m3"))
    if fmt.lower() not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"{where}: FP8 of format {fmt!r} is not supported: use a checkpoint in 'e4m3'")
    how = str(given.get("activation_scheme", "dynamic"))
    if how not in ("dynamic", "static"):
        raise ModelError(
            f"{where}: activation_scheme={how!r} is not supported: use a checkpoint with dynamic or static"
        )
    block = given.get("weight_block_size")
    if block is not None:
        if list(block) != [128, 128]:
            raise ModelError(
                f"{where}: weight_block_size={block!r} is not supported: use a checkpoint with [128, 128]"
            )
        if how == "static":
            raise ModelError(
                f"{where}: activation_scheme='static' with blocks is not supported: use a checkpoint with "
                "dynamic"
            )
        scheme = WeightScheme(
            "fp8", "block", block=(128, 128), activations=ActivationScheme("fp8", True, "group", 128)
        )
        layout = "block"
    else:
        activations = (
            ActivationScheme("fp8") if how == "dynamic" else ActivationScheme("fp8", False, "tensor")
        )
        scheme, layout = WeightScheme("fp8", "tensor", activations=activations), "tensor"
    rule = Rule((LINEAR,), scheme, layout)
    return QuantizationConfig("fp8", (rule,), _unconverted(given, where), source=where)


def _bitsandbytes(given: Mapping[str, Any], where: str) -> QuantizationConfig:
    if given.get("load_in_4bit") or given.get("_load_in_4bit"):
        kind = str(given.get("bnb_4bit_quant_type", "fp4"))
        storage = str(given.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        if kind not in ("nf4", "fp4"):
            raise ModelError(f"{where}: bnb_4bit_quant_type={kind!r} is not supported: use nf4 or fp4")
        if storage != "uint8":
            raise ModelError(
                f"{where}: bnb_4bit_quant_storage={storage!r} is not supported: use a checkpoint in uint8"
            )
        nested = "nested" if given.get("bnb_4bit_use_double_quant") else "plain"
        rule = Rule((LINEAR,), WeightScheme("nf4", "group", 64), f"{kind}_{nested}")
    elif given.get("load_in_8bit") or given.get("_load_in_8bit"):
        rule = Rule((LINEAR,), WeightScheme("int8", "channel"), "int8")
    else:
        raise ModelError(
            f"{where}: bitsandbytes with neither load_in_4bit nor load_in_8bit: fetch the file again"
        )
    return QuantizationConfig("bitsandbytes", (rule,), _unconverted(given, where), source=where)


_METHODS: dict[str, Callable[[Mapping[str, Any], str], QuantizationConfig]] = {
    "compressed-tensors": read_compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
}
