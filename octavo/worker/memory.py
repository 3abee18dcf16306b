"""How many KV blocks fit, and what holds how much memory: measured on the loaded model, not guessed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv.format import KVGroup
from octavo.kv.groups import page_bytes
from octavo.planning.budget import GIB, affordable_blocks, cpu_kv_bytes, gpu_kv_bytes, stated_kv_bytes
from octavo.planning.hardware import detect_memory
from octavo.planning.ledger import Ledger
from octavo.worker.weight_bytes import kept_weight_bytes


@dataclass(frozen=True)
class KVBudget:
    """Bytes that the KV cache may take, and how they were found (for the log)."""

    num_bytes: int
    reason: str


def kv_budget(
    config: EngineConfig, device: torch.device, activation_bytes: int, block_bytes: int, ranks: int = 1
) -> KVBudget:
    """Bytes for the KV cache.

    Args:
        block_bytes: of one block of it.
        activation_bytes: peak of the largest step beyond what is allocated now (GPU).
        ranks: that share the host's memory (CPU).

    Raises:
        ConfigError: nothing is left; the message has free, asked and needed bytes and the setting.
    """
    stated = stated_kv_bytes(config, block_bytes)
    if stated is not None:
        setting, asked = stated
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else detect_memory().available
        # Ranks on a CPU have one memory, and take theirs at the same time.
        if asked * (1 if device.type == "cuda" else ranks) + activation_bytes > free:
            size = "" if setting == "kv_cache_memory_bytes" else f" ({asked} bytes)"
            each = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise ConfigError(
                f"{setting}={getattr(config, setting)}{size}{each} does not fit: {free} bytes are free and a "
                f"step needs {activation_bytes} of them; lower {setting}"
            )
        return KVBudget(asked, setting)
    if device.type == "cpu":
        free = detect_memory().available
        share = config.cpu_memory_utilization / ranks
        return KVBudget(
            cpu_kv_bytes(free, share), f"{share:g} of {free / GIB:.2f} GiB free (cpu_memory_utilization)"
        )
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = gpu_kv_bytes(total, free, config.gpu_memory_utilization, activation_bytes)
    if left <= 0:
        asked = int(total * config.gpu_memory_utilization)
        ours = torch.cuda.memory_reserved(device)
        raise ConfigError(
            f"no memory for the KV cache on {device}: {asked} bytes asked (gpu_memory_utilization="
            f"{config.gpu_memory_utilization:g} of {total}), {free} free, weights hold {ours} and a step "
            f"needs {activation_bytes}; raise gpu_memory_utilization, lower max_num_batched_tokens, or free "
            "the GPU"
        )
    return KVBudget(
        left, f"{config.gpu_memory_utilization:g} of {total / GIB:.1f} GiB (gpu_memory_utilization)"
    )


def check_weights_fit(num_bytes: int, device: torch.device, ranks: int = 1) -> None:
    """Refuse weights that are larger than the memory that is free, before anything is loaded.

    Args:
        num_bytes: of one rank's.
        ranks: that share the host's memory (CPU).

    Raises:
        ConfigError: naming both sizes.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else detect_memory().available
    if device.type == "cpu":
        num_bytes *= ranks
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
    blocks = affordable_blocks(groups, budget.num_bytes, most)
    if not blocks:
        block_bytes = page_bytes(groups)
        raise ConfigError(
            f"the KV cache gets {budget.num_bytes} bytes ({budget.reason}) but one block needs {block_bytes}"
            + (f" and {len(groups)} groups of layers one each" if len(groups) > 1 else "")
            + ": raise num_gpu_blocks_override, kv_cache_memory_bytes or the memory utilization"
        )
    return blocks


def measured_ledger(
    model: Any,
    kv_caches: Sequence[torch.Tensor],
    tables: Iterable[Any],
    device: torch.device,
    activation_bytes: int,
    host_bytes: int = 0,
    draft: Any = None,
) -> Ledger:
    """What holds how much of the device once everything is loaded; see `octavo.planning.ledger.KINDS`.

    On a GPU what the driver and other programs hold is what the device reports beyond our tensors. On a
    CPU a step's tensors come and go and are not counted, and the cache is counted whole, though the system
    gives it memory as it is written.

    Args:
        kv_caches: the caches of the layers; those that share memory count once.
        tables: objects that hold the tables of running requests.
        activation_bytes: what is kept for a step, tables included (GPU).
        host_bytes: of the host tier.
        draft: the draft model, whose cache is among `kv_caches`.
    """
    models = [model] if draft is None else [model, draft]
    held = {
        "weights": sum(sum(kept_weight_bytes(m).values()) for m in models),
        "kv_cache": _storage_bytes(kv_caches),
        "tables": _storage_bytes(t for owner in tables for t in _tensors_of(owner)),
    }
    ours = sum(held.values())
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        held["activations"] = max(0, activation_bytes - held["tables"])
        held["other"] = total - free - ours
    else:
        memory = detect_memory()
        total = memory.total
        held["other"] = total - memory.available - held["weights"]
    held["free"] = total - sum(held.values())
    if host_bytes:
        held["host_cache"] = host_bytes
    return Ledger(total, held)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors_of(owner: Any) -> Iterator[torch.Tensor]:
    """The tensors that are an object's attributes, alone or in lists."""
    for value in vars(owner).values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, torch.Tensor):
                yield item
