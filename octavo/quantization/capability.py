"""Which computation a quantized matrix really gets on a machine: one table, which every command asks.

Being able to read a checkpoint does not mean that its mode runs: the table says what runs instead, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from octavo.quantization.scheme import ActivationScheme, WeightScheme

Mode = Literal["W8A8", "W8A16", "W4A16", "W4A8", "dequantized"]

_FP8 = (8, 9)  # Ada and Hopper multiply FP8
_KERNELS = (8, 0)  # the Triton kernels of 8 and 4 bits are for Ampere and later
_TRITON = "Triton is not installed"
_ROWS8 = "the kernels quantize activations to 8 bits, with a scale for every 32 columns"


@dataclass(frozen=True)
class Hardware:
    """What the table asks of a machine.

    Attributes:
        kind: cpu or cuda.
        capability: compute capability of a GPU.
        kernels: whether this machine has our kernels for quantized matrices: Triton on a GPU; AVX2 and a
            C++ compiler on a CPU.
        name: of the processor, for messages.
    """

    kind: Literal["cpu", "cuda"]
    capability: tuple[int, int] = (0, 0)
    kernels: bool = True
    name: str = ""


@dataclass(frozen=True)
class Running:
    """What runs.

    Attributes:
        mode: bits of weights and activations, or "dequantized": weights are expanded while they are loaded.
        reason: why it is not what the checkpoint asks for; None: it is.
    """

    mode: Mode
    reason: str | None = None

    def __str__(self) -> str:
        return self.mode if self.reason is None else f"{self.mode}, since {self.reason}"


def asked_mode(scheme: WeightScheme) -> Mode:
    """The mode that a checkpoint asks for."""
    if scheme.activations is not None:
        return "W8A8"
    return "W4A16" if scheme.bits == 4 else "W8A16"


def running(scheme: WeightScheme, hardware: Hardware) -> Running:
    """What a matrix of a scheme gets on a machine."""
    if hardware.kind == "cpu":
        return _on_cpu(scheme, hardware)
    asked = asked_mode(scheme)
    if scheme.bits == 4 and scheme.group_size is not None and scheme.group_size % 32:
        return Running("dequantized", f"groups of {scheme.group_size} columns are no multiples of 32")
    if not hardware.kernels:
        return Running("dequantized", _TRITON)
    if hardware.capability < _KERNELS:
        return Running("dequantized", f"the kernels need compute capability 8.0, {_card(hardware)}")
    if scheme.kind in ("int8", "int4") and asked != "W4A16" and (scheme.act_order or not scheme.symmetric):
        what = "act order" if scheme.act_order else "zero points"
        return Running("dequantized", f"the kernels of 8 bits know no {what}")
    if scheme.kind == "fp8" and asked == "W8A8" and hardware.capability < _FP8:
        return Running("W8A16", f"FP8 is multiplied from compute capability 8.9 on, {_card(hardware)}")
    return Running(asked)


def _on_cpu(scheme: WeightScheme, hardware: Hardware) -> Running:
    if scheme.kind in ("fp8", "nf4"):
        return Running("dequantized", f"CPUs have no kernels for {scheme.kind}")
    if not hardware.kernels:
        return Running("dequantized", "the CPU's kernels need AVX2 and a C++ compiler")
    if scheme.kind == "int8":
        if scheme.act_order or not scheme.symmetric:
            what = "act order" if scheme.act_order else "zero points"
            return Running("dequantized", f"the kernels of 8 bits know no {what}")
        if scheme.group_size is not None and scheme.group_size % 32:
            return Running("dequantized", f"groups of {scheme.group_size} columns are no multiples of 32")
        return Running("W8A8", None if scheme.activations is not None else _ROWS8)
    if scheme.group_size is not None and scheme.group_size % 32:
        return Running("dequantized", f"groups of {scheme.group_size} columns are no multiples of 32")
    return Running("W4A8", _ROWS8)


def _card(hardware: Hardware) -> str:
    major, minor = hardware.capability
    return f"{hardware.name or 'this GPU'} has {major}.{minor}"


def table(hardware: Hardware) -> Iterator[tuple[str, Running]]:
    """Every method by its name, and what it gets on a machine."""
    for name, scheme in SCHEMES.items():
        yield name, running(scheme, hardware)


def _schemes() -> dict[str, WeightScheme]:
    fp8, int8 = ActivationScheme("fp8"), ActivationScheme("int8")
    found = (
        WeightScheme("fp8", "channel", activations=fp8),
        WeightScheme("fp8", "tensor", activations=ActivationScheme("fp8", False, "tensor")),
        WeightScheme(
            "fp8", "block", block=(128, 128), activations=ActivationScheme("fp8", True, "group", 128)
        ),
        WeightScheme("int8", "channel", activations=int8),
        WeightScheme("int8", "channel"),
        WeightScheme("int4", "group", 128),
        WeightScheme("int4", "group", 128, symmetric=False),
        WeightScheme("nf4", "group", 64),
    )
    return {scheme.name: scheme for scheme in found}


SCHEMES = _schemes()
"""One of each kind, for tables."""
