"""Choice of the attention backend by name and device. Backends are imported when chosen."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.layers.attention import AttentionBackend

# Name: module, class, device types.
BACKENDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "torch": ("octavo.layers.attention", "TorchAttention", ("cpu", "cuda", "meta")),
    "cpu": ("octavo.layers.attention_cpu", "CPUAttention", ("cpu",)),
    "triton": ("octavo.layers.attention_triton", "TritonAttention", ("cuda",)),
    "invariant": ("octavo.layers.attention_invariant", "InvariantAttention", ("cuda",)),
}
_AUTO = {"cpu": "cpu", "cuda": "triton"}


def resolve_backend(name: str | None, device: torch.device, batch_invariant: bool = False) -> str:
    """The backend's name for a device; None and "auto" take the device's fastest.

    Args:
        name: of a backend, or None or "auto".
        device: where it runs; on "meta", which measures sizes, any will do.
        batch_invariant: take the one whose rows don't depend on the batch.

    Raises:
        ConfigError: an unknown name, or a backend that cannot run on the device.
    """
    if name in (None, "auto"):
        if not batch_invariant or device.type == "meta":
            return _AUTO.get(device.type, "torch")
        name = "invariant"
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend={name!r} is not known: use auto, {', '.join(BACKENDS)}")
    devices = BACKENDS[name][2]
    if name in ("triton", "invariant") and os.environ.get("TRITON_INTERPRET") == "1":
        devices = ("cuda", "cpu")
    if device.type not in devices:
        raise ConfigError(
            f"attention_backend={name!r} does not run on {device.type}: use auto or a device of {devices}"
        )
    return name


def backend_class(name: str) -> type[AttentionBackend]:
    """The class of a backend that `resolve_backend` named.

    Raises:
        ConfigError: its library is not installed.
    """
    module, cls, _ = BACKENDS[name]
    return load_class(name, module, cls)


def load_class(name: str, module: str, cls: str) -> Any:
    """The class `cls` of a module, which the backend `name` is.

    Raises:
        ConfigError: its library is not installed.
    """
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise ConfigError(
            f"attention_backend={name!r} cannot be loaded ({error}): install it, or use torch"
        ) from None
