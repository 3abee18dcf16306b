"""Rotary frequencies that Transformers chooses anew at each forward pass, fixed by the longest context.

Dynamic NTK and LongRoPE depend on a text's length there, which makes the host wait for the device and
changes the keys of tokens that are already cached. Here `max_model_len` decides, as in `layers.rotary`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from octavo.layers.layer import BuildContext, Layer

_FIXED = "fixed"  # a rope type that Transformers never updates


def stop_updates(model: nn.Module) -> dict[nn.Module, Any]:
    """Let no rotary module update itself; returns those that would have, with their types."""
    found: dict[nn.Module, Any] = {}
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            fixed: Any = {key: _FIXED if _updates(value) else value for key, value in kind.items()}
        else:
            fixed = _FIXED if isinstance(kind, str) and _updates(kind) else kind
        if fixed != kind:
            found[module] = kind
            module.__dict__["rope_type"] = fixed
    return found


@contextlib.contextmanager
def own_type(module: nn.Module, found: dict[nn.Module, Any]) -> Iterator[None]:
    """A module with the type that it had, as its own initialization wants it."""
    if module not in found:
        yield
        return
    fixed = module.__dict__["rope_type"]
    module.__dict__["rope_type"] = found[module]
    try:
        yield
    finally:
        module.__dict__["rope_type"] = fixed


def _updates(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


class FixedRope(Layer):
    """Owns the frequencies of the modules that `stop_updates` found."""

    def __init__(self, modules: dict[nn.Module, Any]):
        super().__init__()
        self._found = (modules,)

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        if build.device.type == "meta":
            return
        for module, kind in self._found[0].items():
            kinds = kind if isinstance(kind, dict) else {None: kind}
            for layer_type, name in kinds.items():
                if not isinstance(kind, dict) or _updates(name):
                    self._fix(module, name, layer_type, build)

    def _fix(self, module: Any, kind: str, layer_type: str | None, build: BuildContext) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = module.config
        length = build.max_model_len
        if "dynamic" in kind:
            length = max(length, config.max_position_embeddings)
        by_type = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
            config, torch.device("cpu"), seq_len=length, **by_type
        )
        before = "" if layer_type is None else f"{layer_type}_"
        buffer = frequencies.float().to(build.device)
        module.register_buffer(f"{before}inv_freq", buffer, persistent=False)
        setattr(module, f"{before}attention_scaling", factor)
