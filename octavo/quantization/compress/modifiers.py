"""What a recipe does to a model. Names are llm-compressor's; data alone, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.errors import ConfigError, ModelError
from octavo.quantization.compress.nearest import hint
from octavo.quantization.read_config import read_quantization_entry
from octavo.quantization.scheme import LINEAR, QuantizationConfig

_BITS8_TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


def _weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": False,
        **more,
    }


SCHEMES: dict[str, dict[str, Any]] = {
    "FP8_DYNAMIC": {
        "weights": _weights(8, "float", "channel"),
        "input_activations": {**_BITS8_TOKENS, "type": "float"},
        "format": "float-quantized",
    },
    "FP8_BLOCK": {
        "weights": _weights(8, "float", "block", block_structure=[128, 128]),
        "input_activations": {**_BITS8_TOKENS, "type": "float", "strategy": "group", "group_size": 128},
        "format": "float-quantized",
    },
    "W8A8": {
        "weights": _weights(8, "int", "channel"),
        "input_activations": {**_BITS8_TOKENS, "type": "int"},
        "format": "int-quantized",
    },
    "W8A16": {
        "weights": _weights(8, "int", "channel"),
        "input_activations": None,
        "format": "pack-quantized",
    },
    "W4A16": {
        "weights": _weights(4, "int", "group", group_size=128),
        "input_activations": None,
        "format": "pack-quantized",
    },
}
"""compressed-tensors' presets of the schemes that need no calibration."""
_CALIBRATED = ("GPTQModifier", "AWQModifier", "SmoothQuantModifier")


@dataclass(frozen=True)
class QuantizationModifier:
    """Round weights to nearest.

    Attributes:
        targets: layers: "Linear" for all linear ones, full names, or "re:" patterns of names' beginnings.
        scheme: one of `SCHEMES`; leave it out with `config_groups`.
        ignore: layers that stay as they are, in the same words.
        group_size: columns that share a scale, where the scheme has groups; None: the scheme's 128.
        config_groups: schemes of several groups of layers, in compressed-tensors' words: each a mapping with
            targets, weights, input_activations.

    Raises (on construction):
        ConfigError: a word or scheme that is not known, or no scheme.
    """

    targets: str | Sequence[str] = LINEAR
    scheme: str | None = None
    ignore: str | Sequence[str] = ()
    group_size: int | None = None
    config_groups: Mapping[str, Mapping[str, Any]] | None = None

    def __new__(cls, /, *args: Any, **values: Any) -> QuantizationModifier:
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"QuantizationModifier has no {name!r}: {hint(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("targets", "ignore"):
            _words(name, getattr(self, name))
        if self.config_groups is not None:
            if self.scheme is not None or self.group_size is not None:
                raise ConfigError(
                    "a recipe has scheme (and group_size) or config_groups, not both: take one out"
                )
            if not isinstance(self.config_groups, Mapping) or not self.config_groups:
                raise ConfigError(
                    f"config_groups={self.config_groups!r} is no mapping of groups: give each a name, and "
                    "targets and weights below it"
                )
            return
        if self.scheme is None:
            raise ConfigError(f"QuantizationModifier has no scheme: choose {', '.join(SCHEMES)}")
        if not isinstance(self.scheme, str) or self.scheme not in SCHEMES:
            raise ConfigError(f"scheme={self.scheme!r} is not known: {hint(self.scheme, SCHEMES)}")
        if self.group_size is not None:
            if SCHEMES[self.scheme]["weights"]["strategy"] != "group":
                raise ConfigError(f"group_size={self.group_size}: {self.scheme} has no groups: leave it out")
            size = self.group_size
            if isinstance(size, bool) or not isinstance(size, int) or size < 8 or size % 8:
                raise ConfigError(f"group_size={size!r} is no multiple of 8: give 32, 64 or 128")

    @property
    def entry(self) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint that is made so; its `ignore` in the recipe's words."""
        if self.config_groups is None:
            assert self.scheme is not None
            groups: dict[str, dict[str, Any]] = {
                "group_0": {"targets": list(_words("targets", self.targets)), **_copy(SCHEMES[self.scheme])}
            }
            if self.group_size is not None:
                groups["group_0"]["weights"]["group_size"] = self.group_size
        else:
            groups = {name: _group(name, group) for name, group in self.config_groups.items()}
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {name: {**group, "output_activations": None} for name, group in groups.items()},
            "ignore": list(_words("ignore", self.ignore)),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    @property
    def config(self) -> QuantizationConfig:
        """The entry as the loader reads it.

        Raises:
            ConfigError: a scheme that needs calibration, or that cannot be read here.
        """
        try:
            found = read_quantization_entry(self.entry, "recipe")
        except ModelError as error:
            raise ConfigError(str(error)) from None
        for scheme in found.schemes:
            activations = scheme.activations
            if activations is not None and not activations.dynamic:
                raise ConfigError(
                    f"recipe: static activations ({scheme.name}) need calibration, which is not supported: "
                    "use dynamic ones"
                )
            if not scheme.symmetric or scheme.act_order:
                raise ConfigError(
                    f"recipe: {scheme.name} with {'act order' if scheme.act_order else 'zero points'} is not "
                    "made by this version: use symmetric weights without actorder"
                )
        return found


def known_modifiers() -> dict[str, type[QuantizationModifier]]:
    """By the names that recipes use."""
    return {"QuantizationModifier": QuantizationModifier}


def modifier_of(name: str, values: Mapping[str, Any]) -> QuantizationModifier:
    """The modifier of an entry of a recipe.

    Raises:
        ConfigError: one that there is not, or wrong words in it.
    """
    known = known_modifiers()
    if name in _CALIBRATED:
        raise ConfigError(f"{name} needs calibration, which is not supported: use QuantizationModifier")
    if name not in known:
        raise ConfigError(f"a recipe has no {name!r}: {hint(name, known)}")
    return known[name](**values)


def _words(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{name}={value!r} is no name or list of names: write for example [lm_head]")
    return tuple(words)


def _copy(preset: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in preset.items()}


_GROUP_WORDS = ("targets", "weights", "input_activations", "output_activations", "format")
_ARGUMENTS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
    "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip


def _group(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of `config_groups` with the format that its weights have."""
    if not isinstance(group, Mapping):
        raise ConfigError(f"config_groups: {name}={group!r} is no mapping: give targets and weights")
    for word in group:
        if word not in _GROUP_WORDS:
            raise ConfigError(f"config_groups: {name} has no {word!r}: {hint(word, _GROUP_WORDS)}")
    if not group.get("targets") or not isinstance(group.get("weights"), Mapping):
        raise ConfigError(f"config_groups: {name} lacks targets or weights: give both")
    for part in ("weights", "input_activations"):
        for word in group.get(part) or ():
            if word not in _ARGUMENTS:
                raise ConfigError(
                    f"config_groups: {part} of {name} have no {word!r}: {hint(word, _ARGUMENTS)}"
                )
    if group.get("output_activations"):
        raise ConfigError(f"config_groups: output_activations of {name} are not supported: leave them out")
    weights = {**_weights(8, "int", "channel"), **group["weights"]}
    activations = group.get("input_activations")
    if weights.get("type") == "float":
        made = "float-quantized"
    else:
        made = "pack-quantized" if activations is None else "int-quantized"
    if group.get("format") not in (None, made):
        raise ConfigError(
            f"config_groups: format={group['format']!r} of {name}, whose weights are written as {made!r}: "
            "leave format out"
        )
    return {
        "targets": list(_words("targets", group["targets"])),
        "weights": weights,
        "input_activations": None if activations is None else dict(activations),
        "format": made,
    }
