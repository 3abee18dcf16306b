"""Plain versions of the kernels that prepare a step from the device's tables, and write its tokens back.

Request i of a step is in slot `slots[i]` of the tables and owns rows `starts[i] .. starts[i + 1] - 1`,
which are the next tokens after the `num_computed` that its cache holds. Results go into tensors of the
caller's, so that their addresses stay the same from step to step.
"""

from __future__ import annotations

import torch


def gather_rows(
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
    token_table: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Tokens and positions of a step's rows; counts the rows as computed.

    Args:
        slots: int64 `[n]`.
        starts: int32 `[n + 1]`.
        num_computed: int64 `[slots]`; read, then advanced by each request's rows.
        token_table: int32 `[slots, max_model_len]`.
        token_ids: int32 `[rows]`, written; positions: int64 `[rows]`, written.
        ends: int64 `[n]`, written: tokens computed after the step; seq_lens: the same as int32.
    """
    counts = (starts[1:] - starts[:-1]).long()
    computed = num_computed[slots]
    request = torch.repeat_interleave(counts, output_size=len(token_ids))
    rows = torch.arange(len(token_ids), device=slots.device)
    torch.add(computed[request], rows - starts[request], out=positions)
    token_ids.copy_(token_table[slots[request], positions])
    torch.add(computed, counts, out=ends)
    seq_lens.copy_(ends)
    num_computed[slots] = ends


def map_blocks(
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    columns: int,
    block_rows: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Where a step's rows go in the paged cache, and the block tables of its requests.

    Args:
        slots, starts, ends: as `gather_rows` takes and leaves them.
        block_table: int32 `[slots, width]`.
        block_size: tokens in a block, a power of two.
        columns: entries of each table that any request of the step needs.
        block_rows: int32 `[n, width]`; the first `columns` of each row are written.
        slot_mapping: int64 `[rows]`, written: `block * block_size + offset`.
    """
    counts = (starts[1:] - starts[:-1]).long()
    request = torch.repeat_interleave(counts, output_size=len(slot_mapping))
    rows = torch.arange(len(slot_mapping), device=slots.device)
    positions = ends[request] - starts[1:][request] + rows
    blocks = block_table[slots[request], positions // block_size].long()
    slot_mapping.copy_(blocks * block_size + positions % block_size)
    block_rows[:, :columns] = block_table[slots, :columns]


def append_tokens(
    slots: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor, token_table: torch.Tensor
) -> None:
    """Write each request's new token after its known ones.

    Args:
        slots, ends: int64 `[m]`, of the requests that sampled.
        tokens: int32 `[m]` (any stride).
        token_table: int32 `[slots, max_model_len]`; entry `[slots[i], ends[i]]` is written.
    """
    token_table[slots, ends] = tokens
