"""What is settled of sizes before a model is loaded: its context, its steps, whether its weights fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from octavo.models.pooling_config import PoolingSettings
from octavo.parallel.state import TensorParallelGroup, use_group
from octavo.worker.memory import check_weights_fit


def wanted_length(config: EngineConfig, model: ModelConfig, pooling: PoolingSettings | None) -> int:
    """The context to build the model for, before memory is known.

    Raises:
        ConfigError: more is asked for than the model has.
    """
    most, asked = model.context_length, config.max_model_len
    if asked is None or asked == "auto":
        return most if pooling is None else min(most, pooling.max_length or most)
    assert isinstance(asked, int)
    if asked > most:
        raise ConfigError(f"max_model_len={asked} is beyond the model's context of {most} tokens: lower it")
    return asked


def most_step_rows(config: EngineConfig, device_type: str) -> int:
    """The most tokens that a step computes, of a model that keeps a cache."""
    return config.max_num_batched_tokens or (8192 if device_type == "cuda" else 2048)


def check_size(
    build: Callable[..., Any], group: TensorParallelGroup, device: torch.device, num_ranks: int
) -> None:
    """Refuse a model that is larger than the memory that is free, by its shapes alone.

    Args:
        build: makes this rank's part of the model on a device.
        num_ranks: that share a CPU's memory.

    Raises:
        ConfigError: it does not fit.
    """
    with use_group(group):
        shapes = build(device="meta", attention_backend="torch")
    tensors = {t.data_ptr() or id(t): t for t in (*shapes.parameters(), *shapes.buffers())}
    # Making a rotary table takes twice its own size more.
    rotary = sum(2 * t.nbytes for name, t in shapes.named_buffers() if name.endswith("cos_sin"))
    check_weights_fit(sum(t.nbytes for t in tensors.values()) + rotary, device, num_ranks)
