"""What a setting asks to be made of an unquantized model while it is loaded: data alone, without torch."""

from __future__ import annotations

from octavo.quantization.scheme import LINEAR, ActivationScheme, QuantizationConfig, Rule, WeightScheme

UNTOUCHED = ("lm_head", r"re:.*\.(gate|router)$", r"re:.*\.shared_expert_gate$")
"""What is not quantized: the output head, and what weighs experts."""

_FP8, _INT8 = ActivationScheme("fp8"), ActivationScheme("int8")
_CHANNELS = WeightScheme("fp8", "channel", activations=_FP8)
_SCHEMES = {
    "fp8": _CHANNELS,
    "fp8_per_tensor": WeightScheme("fp8", "tensor", activations=_FP8),
    "fp8_per_channel": _CHANNELS,
    "fp8_per_block": WeightScheme(
        "fp8", "block", block=(128, 128), activations=ActivationScheme("fp8", True, "group", 128)
    ),
    "int8": WeightScheme("int8", "channel", activations=_INT8),
    "int8_weight_only": WeightScheme("int8", "channel"),
    "int4_weight_only": WeightScheme("int4", "group", 128),
}
NAMES = tuple(_SCHEMES)


def online(name: str) -> QuantizationConfig:
    """The configuration of one of `NAMES`."""
    scheme = _SCHEMES[name]
    layout = "pack-quantized" if scheme.bits == 4 else f"{scheme.kind.rstrip('48')}-quantized"
    return QuantizationConfig("online", (Rule((LINEAR,), scheme, layout),), UNTOUCHED, setting=name)
