"""How memory is divided, stated once for the worker, which measures, and for plans, which compute. Bytes."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.kv.capacity import blocks_of
from octavo.kv.format import KVGroup
from octavo.kv.groups import page_bytes

GIB = 1 << 30
MIB = 1 << 20

# Of the KV cache's memory: what a draft's blocks take at most if one request's fit into that, and else.
_DRAFT_SHARE = 0.15
_MOST_DRAFT_SHARE = 0.5
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


def useful_blocks(groups: Sequence[KVGroup], max_num_seqs: int, max_model_len: int) -> int:
    """Blocks beyond which no request could use any, as if windows freed nothing: what they free serves the
    prefix cache."""
    return max_num_seqs * blocks_of(max_model_len, groups[0].format.block_size) * len(groups)


def affordable_blocks(groups: Sequence[KVGroup], num_bytes: int, most: int) -> int:
    """Blocks that `num_bytes` hold, at most `most`; 0 if there is not even one for each group."""
    blocks = min(max(0, num_bytes) // page_bytes(groups), most)
    return blocks if blocks >= len(groups) else 0


def draft_blocks(
    groups: Sequence[KVGroup], num_bytes: int, max_num_seqs: int, max_model_len: int, most_drafts: int
) -> int:
    """Blocks for a draft model's KV, out of `num_bytes` for the target's and its own; 0: there is no room.

    As many as all requests could use, but no larger a part than they are worth where memory is short: drafts
    pay with few requests, so a text's length for each of a few is enough.

    Args:
        groups: the draft's.
        max_model_len: tokens of the longest text that it drafts for.
        most_drafts: tokens drafted in a step.
    """
    one = blocks_of(max_model_len + most_drafts, groups[0].format.block_size) * len(groups)
    page = page_bytes(groups)
    affordable = max(
        int(_DRAFT_SHARE * num_bytes) // page, min(one, int(_MOST_DRAFT_SHARE * num_bytes) // page)
    )
    return min(affordable, max_num_seqs * one) if affordable >= len(groups) else 0


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
    step = (4 + 8) * max_rows + (8 + 8 + 8 + 4) * max_num_seqs + 4 * (max_num_seqs + 1) + 4
    sampling = _SAMPLING_BYTES * max_num_seqs
    return slots * per_request + len(groups) * per_group + step + sampling
