"""The C++ kernels that prepare a step; twins of `octavo.kernels.reference_batch`, where the arguments are
documented. The tables and results must be contiguous, as their owner allocates them."""

from __future__ import annotations

import torch

from octavo.kernels.cpu.ops import library


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
    """See the twin."""
    library().octavo_gather_rows(
        slots.data_ptr(),
        starts.data_ptr(),
        len(slots),
        num_computed.data_ptr(),
        token_table.data_ptr(),
        token_table.stride(0),
        token_ids.data_ptr(),
        positions.data_ptr(),
        ends.data_ptr(),
        seq_lens.data_ptr(),
    )


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
    """See the twin."""
    library().octavo_map_blocks(
        slots.data_ptr(),
        starts.data_ptr(),
        ends.data_ptr(),
        len(slots),
        block_table.data_ptr(),
        block_table.stride(0),
        block_size,
        columns,
        block_rows.data_ptr(),
        block_rows.stride(0),
        slot_mapping.data_ptr(),
    )


def append_tokens(
    slots: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor, token_table: torch.Tensor
) -> None:
    """See the twin."""
    library().octavo_append_tokens(
        slots.data_ptr(),
        ends.data_ptr(),
        tokens.data_ptr(),
        tokens.stride(0),
        len(slots),
        token_table.data_ptr(),
        token_table.stride(0),
    )
