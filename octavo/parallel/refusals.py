"""What parallel ranks cannot do: refused at start, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config import EngineConfig


def check_ranks(config: EngineConfig) -> None:
    """Refuse settings that do not work with ranks in processes of their own.

    Raises:
        ConfigError: naming both sides, and the remedy.
    """
    sizes = {name: getattr(config, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    told = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    ranks = " and ".join(told) or f"distributed_executor_backend={config.distributed_executor_backend!r}"
    if config.distributed_executor_backend == "uni":
        raise ConfigError(
            f"{ranks} needs a process for each rank: leave distributed_executor_backend='uni' out"
        )
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f"device={config.device!r} with {ranks}: give cuda, and choose devices by CUDA_VISIBLE_DEVICES"
        )
    if config.pipeline_parallel_size > 1:
        _check_stages(config)
    if config.kv_disk_path is not None:
        raise ConfigError(f"kv_disk_path does not work with {ranks}: leave it out")


def _check_stages(config: EngineConfig) -> None:
    """Refuse what pipeline stages cannot do."""
    speculative = config.speculative
    if speculative is not None and speculative.model is not None:
        raise ConfigError(
            f"speculative_config: method {speculative.method!r} drafts beside the whole model, which "
            f"pipeline_parallel_size={config.pipeline_parallel_size} divides: use ngram or suffix, or "
            "tensor_parallel_size"
        )
