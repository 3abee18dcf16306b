"""Layers made and filled as the loader does it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from octavo.layers.layer import BuildContext, Layer
from octavo.parallel.state import TensorParallelGroup
from octavo.quantization.linear_method import linear_method

CPU = torch.device("cpu")


def build_context(**changes: Any) -> BuildContext:
    """A float32 context on the CPU for one rank, but for `changes`."""
    plain = dict(
        dtype=torch.float32,
        device=CPU,
        max_model_len=64,
        attention_backend="torch",
        block_size=8,
        kv_dtype="float32",
        group=TensorParallelGroup(),
        linear_method=partial(linear_method, None),
    )
    return BuildContext(**{**plain, **changes})


@torch.no_grad()
def fill(layers: dict[str, Layer], weights: dict[str, torch.Tensor], build: BuildContext) -> None:
    """Make layers, give them those of the weights that they take, and, if there are any, let them repack."""
    for name, layer in layers.items():
        layer.create_weights(build, name)
    for name, layer in layers.items():
        for key, target in layer.load_targets(name).items():
            if key in weights:
                assert target.takes(tuple(weights[key].shape))
                target.load(weights[key])
    for layer in reversed(layers.values()) if weights else ():  # in any order
        layer.process_after_load()
