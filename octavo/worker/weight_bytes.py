"""What a step reads of a model's weights, by its shapes."""

from __future__ import annotations

from torch import nn

from octavo.layers.embedding import VocabEmbedding


def step_weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that one step reads at most: all of them, but of the embedding's table only the rows
    looked up (so it counts only where the head shares it) and of the rotary tables none."""
    sizes: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, VocabEmbedding):
            continue
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if not name.endswith("cos_sin"):
                sizes[tensor.data_ptr()] = max(tensor.nbytes, sizes.get(tensor.data_ptr(), 0))
    return sum(sizes.values())
