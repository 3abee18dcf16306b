"""Loading weights that are in memory already: what fits as it is becomes the model's, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.models.held import HeldModel
from octavo.models.targets import Targets, check_tensors
from octavo.models.weights import check_dtype


class InMemory(Iterator[tuple[str, torch.Tensor]]):
    """Weights for `load_weights` that may be kept.

    Attributes:
        name: the model's.
    """

    def __init__(self, name: str, weights: Iterator[tuple[str, torch.Tensor]]):
        self.name = name
        self._weights = weights

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._weights)


def held_weights(
    model: HeldModel, targets: Targets, architecture: str
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Total bytes, and the weights one by one, of a model in memory.

    Raises:
        ModelError: they are not those of the architecture.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.tensors.items()}
    names = check_tensors(shapes, targets, model.name, architecture)
    for name in names:
        dtype = model.tensors[name].dtype
        check_dtype(model.name, name, str(dtype), dtype, targets)
    total = sum(model.tensors[name].nbytes for name in names)
    return total, ((name, model.tensors[name].detach()) for name in names)


class SharedMatrices(TorchDispatchMode):
    """While it is entered, a parameter to which a whole matrix would be copied becomes that matrix's memory
    instead, where type, device and layout are the same. Vectors are copied: layers change some in place.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._matrices = {p.data_ptr(): p for p in model.parameters() if p.ndim == 2 and p.numel()}
        self._shared: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._fits(*args[:2]):
            place, given = args[:2]
            self._matrices.pop(place.data_ptr()).data = given.detach()
            self._shared.add(given.data_ptr())
            return place
        return func(*args, **(kwargs or {}))

    def _fits(self, place: torch.Tensor, given: torch.Tensor) -> bool:
        parameter = self._matrices.get(place.data_ptr())
        return (
            parameter is not None
            and place.shape == given.shape == parameter.shape
            and place.dtype == given.dtype
            and place.device == given.device
            and given.is_contiguous()
        )

    def shared_bytes(self, model: torch.nn.Module) -> int:
        """Bytes of a model's parameters that are others' memory, now that its layers have repacked."""
        kept = {p.data_ptr(): p.nbytes for p in model.parameters()}
        return sum(nbytes for place, nbytes in kept.items() if place in self._shared)
