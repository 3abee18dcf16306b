"""How memory is divided, stated once for the worker, which measures, and for plans, which compute. Bytes."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.config import EngineConfig
from octavo.kv.capacity import blocks_of
from octavo.kv.draft_pages import draft_pages
from octavo.kv.format import KVGroup
from octavo.kv.groups import page_bytes

GIB = 1 << 30
MIB = 1 << 20

_SAMPLING_BYTES = 4 * 12  # a request's settings: `octavo.sampling.state`


def with_slack(peak: int) -> int:
    """What is kept for a step whose tensors take `peak` at most.

    Fragmentation and libraries' workspaces are not in PyTorch's count: a twentieth and 256 MiB.
    """
    return int(peak * 1.05) + 256 * MIB


def gpu_kv_bytes(total: int, free: int, utilization: float, activations: int) -> int:
    """What is left for the KV cache on a GPU, negative if nothing.

    Args:
        total, free: of the device once the weights are there. What others hold can't be had, whatever
            the utilization says; `total - free` counts it as ours.
        utilization: share of the total that may be used.
        activations: what a step needs (`with_slack`).
    """
    return min(int(total * utilization) - (total - free), free) - activations


def cpu_kv_bytes(available: int, share: float) -> int:
    """What the KV cache takes on a CPU: a share of what is free once the weights are there."""
    return int(available * share)


def stated_kv_bytes(config: EngineConfig, block_bytes: int) -> tuple[str, int] | None:
    """The size of the KV cache where a setting states it outright, and that setting; None: it doesn't.

    Args:
        block_bytes: of one block (`page_bytes`).
    """
    if config.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override", config.num_gpu_blocks_override * block_bytes
    if config.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes", config.kv_cache_memory_bytes
    return None


def most_blocks(
    config: EngineConfig, groups: Sequence[KVGroup], draft_groups: Sequence[KVGroup], max_model_len: int
) -> int:
    """Blocks that the pool has where memory allows: as many as the settings say, or as could be used.

    Args:
        draft_groups: of a draft model, if there is one.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    most = useful_blocks(groups, config.max_num_seqs, max_model_len)
    if draft_groups and config.speculative is not None:
        length = max_model_len + config.speculative.num_speculative_tokens
        most += useful_draft_pages(groups, draft_groups, config.max_num_seqs, length)
    return most


def useful_blocks(groups: Sequence[KVGroup], max_num_seqs: int, max_model_len: int) -> int:
    """Blocks beyond which no request could use any, as if windows freed nothing: what they free serves the
    prefix cache."""
    return max_num_seqs * blocks_of(max_model_len, groups[0].format.block_size) * len(groups)


def affordable_blocks(groups: Sequence[KVGroup], num_bytes: int, most: int) -> int:
    """Blocks that `num_bytes` hold, at most `most`; 0 if there is not even one for each group."""
    blocks = min(max(0, num_bytes) // page_bytes(groups), most)
    return blocks if blocks >= len(groups) else 0


def useful_draft_pages(
    groups: Sequence[KVGroup], draft_groups: Sequence[KVGroup], max_num_seqs: int, max_model_len: int
) -> int:
    """Pages of the target's pool beyond `useful_blocks` that a draft model's KV can use.

    Args:
        max_model_len: tokens of the longest text, with its drafts.
    """
    columns = blocks_of(max_model_len, draft_groups[0].format.block_size)
    pages = draft_pages(groups, draft_groups, useful_blocks(groups, max_num_seqs, max_model_len))
    return max_num_seqs * pages.pages_for(columns * len(draft_groups)) if pages.blocks else 0


def draft_table_bytes(groups: Sequence[KVGroup], max_num_seqs: int, max_model_len: int, max_rows: int) -> int:
    """What a draft model's tables take: those of `table_bytes`, but for tokens and sampling settings, which
    it shares with the target.

    Args:
        groups: the draft's.
        max_model_len: the target's.
    """
    whole = table_bytes(groups, max_num_seqs, max_model_len, max_rows)
    return whole - (max_num_seqs + 1) * 4 * max_model_len - _SAMPLING_BYTES * max_num_seqs


def table_bytes(groups: Sequence[KVGroup], max_num_seqs: int, max_model_len: int, max_rows: int) -> int:
    """What the tables of running requests take (`octavo.worker.input_batch`): their tokens, two tables of
    blocks per group, a step's inputs, and sampling settings."""
    slots, columns = max_num_seqs + 1, blocks_of(max_model_len, groups[0].format.block_size)
    per_request = 4 * max_model_len + 8  # tokens, and how many are computed
    per_group = 4 * columns * (slots + max_num_seqs) + 8 * max_rows
    step = (4 + 8) * max_rows + (8 + 8 + 8 + 8 + 4) * max_num_seqs + 4 * (max_num_seqs + 1) + 4
    sampling = _SAMPLING_BYTES * max_num_seqs
    return slots * per_request + len(groups) * per_group + step + sampling
