"""What a model's weights take in memory, and what a step reads of them, by the tensors that are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from octavo.layers.embedding import VocabEmbedding


def step_weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that one step reads at most: all of them, but of the embedding's table only the rows
    looked up (so it counts only where the head shares it) and of the rotary tables none."""
    sizes: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, VocabEmbedding):
            continue
        for name, tensor in _tensors(module):
            if not name.endswith("cos_sin"):
                sizes[_place(tensor)] = max(tensor.nbytes, sizes.get(_place(tensor), 0))
    return sum(sizes.values())


def kept_weight_bytes(model: nn.Module) -> Counter[str]:
    """Bytes that the weights hold, by PyTorch's names of their dtypes; shared ones count once."""
    out: Counter[str] = Counter()
    for tensor in weight_tensors(model):
        out[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return out


def weight_tensors(model: nn.Module) -> list[torch.Tensor]:
    """All tensors that hold weights; of those that begin at the same place the largest."""
    kept: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for _, tensor in _tensors(module):
            place = _place(tensor)
            if place not in kept or tensor.nbytes > kept[place].nbytes:
                kept[place] = tensor
    return list(kept.values())


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own tensors: parameters, buffers, and matrices in a form that PyTorch registers nowhere."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
        if isinstance(tensor, torch.Tensor):
            yield name, tensor
    plain = getattr(vars(module).get("store"), "plain", None)  # of a quantized layer stored unquantized
    if isinstance(plain, nn.Module):
        yield from _tensors(plain)


def _place(tensor: torch.Tensor) -> int:
    """What tells two tensors' memory apart; a matrix in oneDNN's layout has no address."""
    return id(tensor) if tensor.layout is torch._mkldnn else tensor.data_ptr() or id(tensor)  # type: ignore[attr-defined]
