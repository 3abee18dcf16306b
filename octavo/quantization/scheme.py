"""What a quantized checkpoint says of its matrices: data alone, that any command may read without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Format = Literal["compressed-tensors", "gptq", "awq", "fp8", "bitsandbytes", "online", "gguf", "half", "int8"]
WeightKind = Literal["fp8", "int8", "int4", "nf4"]
WeightStrategy = Literal["tensor", "channel", "group", "block"]
ActivationKind = Literal["fp8", "int8"]
ActivationStrategy = Literal["token", "tensor", "group"]

FORMATS = ("compressed-tensors", "gptq", "awq", "fp8", "bitsandbytes")
"""Those of checkpoints in safetensors."""
LINEAR = "Linear"  # the class name that stands for every linear layer among targets
_EMBEDDING = "embed_tokens"


@dataclass(frozen=True)
class ActivationScheme:
    """How the rows of activations are quantized before a product; symmetric.

    Attributes:
        kind: fp8 (E4M3) or int8.
        dynamic: scales come from the rows themselves; False: from the checkpoint (`input_scale`).
        strategy: one scale per row ("token"), one for all ("tensor"), one per row and `group_size` columns.
        group_size: columns of a group.
    """

    kind: ActivationKind
    dynamic: bool = True
    strategy: ActivationStrategy = "token"
    group_size: int | None = None


@dataclass(frozen=True)
class WeightScheme:
    """How a matrix `[out, in]` is stored, and how its input is quantized.

    Attributes:
        kind: fp8 (E4M3), int8, int4, or nf4 (4 bits that choose from a table of 16 numbers).
        strategy: one scale for all ("tensor"), per row ("channel"), per row and `group_size` columns
            ("group"), per `block` of rows and columns ("block").
        group_size: columns that share a scale, where the strategy is "group".
        block: rows and columns that share a scale, where it is "block".
        symmetric: zero is code 0; False: each scale has a zero point.
        activations: None: they stay as they are.
        act_order: groups are of columns that lie apart (GPTQ's desc_act, compressed-tensors' actorder).
    """

    kind: WeightKind
    strategy: WeightStrategy
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    activations: ActivationScheme | None = None
    act_order: bool = False

    @property
    def bits(self) -> int:
        """Bits of a weight, scales aside."""
        return 4 if self.kind in ("int4", "nf4") else 8

    @property
    def name(self) -> str:
        """What llm-compressor calls it where it has a name: FP8_DYNAMIC, W4A16, W8A8, …"""
        if self.kind == "nf4":
            return "NF4"
        if self.kind == "fp8":
            if self.activations is None:
                return "FP8_W8A16"
            if self.strategy == "block":
                return "FP8_BLOCK"
            return "FP8_DYNAMIC" if self.activations.dynamic else "FP8"
        computed = "A16" if self.activations is None else "A8"
        return f"W{self.bits}{computed}" + ("" if self.symmetric else "_ASYM")


@dataclass(frozen=True)
class Rule:
    """A scheme and the layers that have it.

    Attributes:
        targets: full names, "re:" patterns of their beginnings, or "Linear" for every linear layer, output
            head included.
        scheme: None: these layers are not quantized.
        layout: how the tensors are packed, in the format's own words ("pack-quantized", "gptq_v2", …).
    """

    targets: tuple[str, ...]
    scheme: WeightScheme | None
    layout: str = ""


@dataclass(frozen=True)
class QuantizationConfig:
    """Which layers of a model are quantized, and how.

    Attributes:
        format: whose tensors a checkpoint holds; "online", "int8" and "half": what the engine makes of an
            unquantized one while it loads; "gguf": GGML's encodings are kept.
        rules: one that matches a layer by its name or a pattern comes before one of every linear layer,
            then the first counts.
        ignore: layers that are not quantized, in the words of `Rule.targets`.
        kv_cache: "fp8" or "int8" where the checkpoint has scales for keys and values; None otherwise.
        source: the file that says so, for messages.
        dense: how matrices that are not quantized, or that are dequantized while they are loaded, are kept:
            in the activations' dtype ("plain") or in 16 bits beside float32 ("half").
        dequantize: whether every matrix is dequantized while it is loaded.
        setting: of "online", what the user asked for.
    """

    format: Format
    rules: tuple[Rule, ...] = ()
    ignore: tuple[str, ...] = ()
    kv_cache: Literal["fp8", "int8"] | None = None
    source: str = ""
    dense: Literal["plain", "half"] = "plain"
    dequantize: bool = False
    setting: str = ""

    def rule_for(self, prefix: str) -> Rule | None:
        """The rule of the layer `prefix`, a checkpoint's name (`model.layers.0.mlp.down_proj`); None: it is
        not quantized."""
        if self._ignored.names(prefix) or self._ignored.covers(prefix):
            return None
        found = next((rule for rule, targets in self._matchers if targets.names(prefix)), None)
        if found is None:
            found = next((rule for rule, targets in self._matchers if targets.covers(prefix)), None)
        return found if found is not None and found.scheme is not None else None

    def scheme_for(self, prefix: str) -> WeightScheme | None:
        """The scheme of the layer `prefix`, a checkpoint's name; None: it is not quantized."""
        rule = self.rule_for(prefix)
        return None if rule is None else rule.scheme

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """Every scheme that some layer may have, once."""
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    @property
    def title(self) -> str:
        """The format, for people, and the setting that made it."""
        return f"{self.format} {self.setting}".rstrip()

    @property
    def label(self) -> str:
        """Format and schemes, for people."""
        names = ", ".join(scheme.name for scheme in self.schemes)
        return f"{self.title} ({names})" if names else self.title

    @cached_property
    def _matchers(self) -> list[tuple[Rule, _Targets]]:
        return [(rule, _Targets(rule.targets)) for rule in self.rules]

    @cached_property
    def _ignored(self) -> _Targets:
        return _Targets(self.ignore)


class _Targets:
    """Names and patterns of layers, as compressed-tensors matches them."""

    def __init__(self, targets: tuple[str, ...]):
        self._names = frozenset(t for t in targets if not t.startswith("re:"))
        self._patterns = [re.compile(t.removeprefix("re:")) for t in targets if t.startswith("re:")]

    def names(self, prefix: str) -> bool:
        """Whether the layer is named, or matched by a pattern."""
        return prefix in self._names or any(pattern.match(prefix) for pattern in self._patterns)

    def covers(self, prefix: str) -> bool:
        """Whether all linear layers are meant, and the layer is one."""
        return LINEAR in self._names and not prefix.endswith(_EMBEDDING)


def setting(name: str) -> QuantizationConfig:
    """The configuration of a setting that says all by its name: gguf, half, int8."""
    assert name in ("gguf", "half", "int8"), name
    return QuantizationConfig(name)  # type: ignore[arg-type]
