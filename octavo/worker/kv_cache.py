"""The memory of the KV cache: equal pages that layers of all groups share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.errors import ConfigError, first_line
from octavo.kv.draft_pages import DraftPages
from octavo.kv.format import KVGroup
from octavo.kv.groups import layers_per_page


def allocate_caches(
    groups: Sequence[KVGroup], num_blocks: int, device: torch.device, drafts: DraftPages | None = None
) -> list[torch.Tensor]:
    """Zeroed caches, one per attention layer in the layers' order.

    The j-th layers of all groups are views of one buffer: a block belongs to one group at a time, so
    they never use the same part of it.

    Args:
        drafts: how a draft's blocks lie in the same memory, which is one piece then (`draft_caches`).

    Returns:
        Tensors `[num_blocks, *layer_block_shape]` of each layer's storage dtype.

    Raises:
        ConfigError: the device has too little memory.
    """
    size = num_blocks * groups[0].format.layer_block_bytes()
    if drafts is None:
        buffers = [_zeros(size, device) for _ in range(layers_per_page(groups))]
    else:
        whole = _zeros(drafts.buffers * drafts.buffer_bytes, device)
        buffers = [part[:size] for part in whole.split(drafts.buffer_bytes)]
    return _views(groups, num_blocks, buffers)


def draft_caches(
    caches: Sequence[torch.Tensor], groups: Sequence[KVGroup], pages: DraftPages
) -> list[torch.Tensor]:
    """A draft's caches in the memory of its target's, one per attention layer in the layers' order.

    Args:
        caches: the target's, as `allocate_caches` made them with the same `pages`.
        groups: the draft's.
    """
    memory = caches[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=caches[0].device).set_(memory)
    starts = [pages.first_row(place) for place in range(pages.layers)]
    rows = pages.num_rows - max(starts)  # those of any block
    buffers = [whole[start * pages.unit : (start + rows) * pages.unit] for start in starts]
    return _views(groups, rows, buffers)


def _views(groups: Sequence[KVGroup], num_blocks: int, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Caches in the layers' order; the j-th layers of all groups lie in the j-th buffer."""
    caches = {
        layer: buffer.view(getattr(torch, group.format.storage_dtype)).view(
            num_blocks, *group.format.layer_block_shape()
        )
        for group in groups
        for fmt in (group.format,)
        for buffer, layer in zip(buffers, group.layers, strict=False)  # a last group may have fewer layers
    }
    return [caches[layer] for layer in range(len(caches))]


def page_buffers(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The buffers behind caches, which layers of several groups share: uint8 `[num_blocks, piece]` each, a
    block's piece being a row. A block's rows of all buffers are its page."""
    buffers = {cache.data_ptr(): cache.reshape(len(cache), -1).view(torch.uint8) for cache in caches}
    return list(buffers.values())


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        # NumPy's zeros cost no memory until they are written; PyTorch's do.
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the KV cache does not fit on {device}: {first_line(error)} Lower "
            "gpu_memory_utilization or kv_cache_memory_bytes"
        ) from None
