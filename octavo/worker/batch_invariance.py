"""What `batch_invariant` cannot promise is refused at the start, by name."""

from __future__ import annotations

import importlib.util

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv.format import QUANTIZED
from octavo.models.config import ModelConfig

_CAPABILITY = (8, 0)


def check_batch_invariant(
    config: EngineConfig, device: torch.device, model: ModelConfig, pooling: bool
) -> None:
    """Refuse a device or model whose rows would depend on the batch in spite of the setting.

    Args:
        config: the engine's settings; without `batch_invariant` anything goes.
        device: that it runs on.
        model: the architecture.
        pooling: whether it serves embeddings.

    Raises:
        ConfigError: names the reason and the remedy.
    """
    if not config.batch_invariant:
        return
    reason = (
        _why_not_device(device) or _why_not_cache(config.kv_cache_dtype) or _why_not_model(model, pooling)
    )
    if reason is not None:
        raise ConfigError(f"batch_invariant {reason}, or leave batch_invariant out")


def _why_not_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, and the model runs on {device}: use device='cuda'"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return (
            f"needs a GPU of compute capability 8.0 or above, and {device} has "
            f"{capability[0]}.{capability[1]}: use another"
        )
    if importlib.util.find_spec("triton") is None:
        return "needs Triton: install it"
    return None


def _why_not_cache(dtype: str) -> str | None:
    if dtype in QUANTIZED:
        return f"has no kernel for kv_cache_dtype={dtype!r}: use kv_cache_dtype='auto'"
    return None


def _why_not_model(model: ModelConfig, pooling: bool) -> str | None:
    if pooling:
        return "does not serve embeddings: use runner='generate'"
    if model.implementation != "octavo":
        return f"does not run {model.architecture} through transformers: use a family of Octavo's own"
    if model.moe is not None:
        return f"has no kernels for the experts of {model.architecture}: use a dense model"
    if model.latent is not None:
        return f"has no kernel for the latent attention of {model.architecture}: use another model"
    return None
