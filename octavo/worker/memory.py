"""How many KV blocks fit: measured on the loaded model, not guessed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv.format import KVGroup
from octavo.kv.groups import page_bytes
from octavo.planning.hardware import detect_memory

GIB = 1 << 30


@dataclass(frozen=True)
class KVBudget:
    """Bytes that the KV cache may take, and how they were found (for the log)."""

    num_bytes: int
    reason: str


def kv_budget(config: EngineConfig, device: torch.device, activation_bytes: int) -> KVBudget:
    """Bytes for the KV cache.

    Args:
        activation_bytes: peak of the largest step beyond what is allocated now (GPU).

    Raises:
        ConfigError: nothing is left; the message has free, asked and needed bytes and the setting.
    """
    if config.kv_cache_memory_bytes is not None:
        asked = config.kv_cache_memory_bytes
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else detect_memory().available
        if asked + activation_bytes > free:
            raise ConfigError(
                f"kv_cache_memory_bytes={asked} does not fit: {free} bytes are free and a step needs "
                f"{activation_bytes} of them; lower kv_cache_memory_bytes"
            )
        return KVBudget(asked, "kv_cache_memory_bytes")
    if device.type == "cpu":
        free = detect_memory().available
        share = config.cpu_memory_utilization
        return KVBudget(int(free * share), f"{share:g} of {free / GIB:.2f} GiB free (cpu_memory_utilization)")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    asked = int(total * config.gpu_memory_utilization)
    ours = torch.cuda.memory_reserved(device)
    # What others hold can't be had, whatever the setting says; `total - free` counts it too.
    left = min(asked - (total - free), free) - activation_bytes
    if left <= 0:
        raise ConfigError(
            f"no memory for the KV cache on {device}: {asked} bytes asked (gpu_memory_utilization="
            f"{config.gpu_memory_utilization:g} of {total}), {free} free, weights hold {ours} and a step "
            f"needs {activation_bytes}; raise gpu_memory_utilization, lower max_num_batched_tokens, or free "
            "the GPU"
        )
    return KVBudget(
        left, f"{config.gpu_memory_utilization:g} of {total / GIB:.1f} GiB (gpu_memory_utilization)"
    )


def check_weights_fit(num_bytes: int, device: torch.device) -> None:
    """Refuse weights that are larger than the memory that is free, before anything is loaded.

    Raises:
        ConfigError: naming both sizes.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else detect_memory().available
    if num_bytes > free:
        raise ConfigError(
            f"the weights need {num_bytes} bytes and {free} are free on {device}: free memory, lower "
            "max_model_len, or choose a smaller dtype or model"
        )


def num_blocks(budget: KVBudget, groups: list[KVGroup], most: int) -> int:
    """Blocks that the budget holds, at most `most` (what all requests together could use).

    Raises:
        ConfigError: there is not even one block for each group.
    """
    block_bytes = page_bytes(groups)
    blocks = min(budget.num_bytes // block_bytes, most)
    if blocks < len(groups):
        raise ConfigError(
            f"the KV cache gets {budget.num_bytes} bytes ({budget.reason}) but one block needs {block_bytes}"
            + (f" and {len(groups)} groups of layers one each" if len(groups) > 1 else "")
            + ": raise kv_cache_memory_bytes or the memory utilization"
        )
    return blocks
