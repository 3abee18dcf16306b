"""Linear layers whose every row is the same bits whatever rows stand beside it: for `--batch-invariant`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.kernels.triton.invariant_linear import invariant_linear
from octavo.quantization.embedding_method import UnquantizedEmbeddingMethod
from octavo.quantization.linear_method import LinearMethod
from octavo.quantization.scheme import QuantizationConfig


class InvariantLinearMethod(UnquantizedEmbeddingMethod):
    """The matrix as it is, multiplied by `octavo.kernels.triton.invariant_linear`.

    Norms before the product and activations after it are kernels of their own, one program a row, since
    the ones that take them in are chosen by the number of rows.
    """

    name = "batch-invariant"
    fuses = False

    def process_after_load(self, layer: nn.Module) -> None:
        pass  # nothing is repacked

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return invariant_linear(x, layer.weight, bias)  # type: ignore[arg-type]


def invariant_method(
    quantization: QuantizationConfig | None, prefix: str, parts: Sequence[str] = ()
) -> LinearMethod:
    """The method for the layer named `prefix`; arguments as for `linear_method`.

    Raises:
        ConfigError: weights are to be kept quantized.
    """
    if quantization is not None:
        raise ConfigError(
            f"batch_invariant multiplies no quantized weights ({quantization.format}): use "
            "quantization='none' (a GGUF file), an unquantized checkpoint, or leave batch_invariant out"
        )
    return InvariantLinearMethod()
