"""The memory ledger: what holds how much, and what fits into the rest; planned or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.kv.capacity import request_blocks, token_capacity
from octavo.kv.format import KVGroup
from octavo.kv.groups import page_bytes
from octavo.planning.budget import GIB

KINDS = {
    "weights": "the model's weights, in the form in which they are kept",
    "kv_cache": "the pool of KV blocks",
    "tables": "tokens and block tables of running requests",
    "activations": "the largest step's tensors, and what is kept for fragmentation and workspaces",
    "graphs": "recorded decode steps; they come as batch sizes are first met, out of what is left",
    "other": "the driver's, this process's and other programs'",
    "free": "left",
    "host_cache": "the host tier, in host memory",
}
"""What memory is counted as. All but host_cache are on the device and add up to its total."""
DEVICE_KINDS = tuple(kind for kind in KINDS if kind != "host_cache")


@dataclass(frozen=True)
class KVFit:
    """What a pool of KV blocks holds.

    Attributes:
        num_blocks, block_tokens, block_bytes: the pool, and one block of it.
        bytes_per_token: of a request's growth: what groups keep that see the whole context.
        window_bytes: most that a request holds beside that in groups with a sliding window.
        num_tokens: tokens of requests of `request_len` that are held at once.
        request_len: tokens of the requests that are planned for, prompt and output.
        num_requests: as many of them as fit at once, blocks that they share counted for each.
        longest: tokens of the longest context that fits, at most what the model allows.
    """

    num_blocks: int
    block_tokens: int
    block_bytes: int
    bytes_per_token: int
    window_bytes: int
    num_tokens: int
    request_len: int
    num_requests: int
    longest: int


def kv_fit(groups: Sequence[KVGroup], num_blocks: int, request_len: int, context_length: int) -> KVFit:
    """What `num_blocks` blocks hold of requests of `request_len` tokens.

    Args:
        context_length: most tokens of a context, whatever the memory.
    """
    page, size = page_bytes(groups), groups[0].format.block_size
    full = [group for group in groups if group.sliding_window is None]
    windows = [group for group in groups if group.sliding_window is not None]
    each = request_blocks(groups, request_len)
    count = num_blocks // each
    one_group = len(groups) == 1 and not windows
    return KVFit(
        num_blocks=num_blocks,
        block_tokens=size,
        block_bytes=page,
        bytes_per_token=len(full) * page // size,
        window_bytes=request_blocks(windows, request_len) * page if windows else 0,
        num_tokens=num_blocks * size if one_group else count * request_len,
        request_len=request_len,
        num_requests=count,
        longest=token_capacity(groups, num_blocks, context_length) if num_blocks else 0,
    )


@dataclass(frozen=True)
class Ledger:
    """One device's memory.

    Attributes:
        total: bytes of the device.
        held: bytes by kind (see `KINDS`); kinds that are not known are left out.
    """

    total: int
    held: dict[str, int] = field(default_factory=dict)

    @property
    def accounted(self) -> int:
        """Bytes of the device that some kind holds, or are free."""
        return sum(self.held.get(kind, 0) for kind in DEVICE_KINDS)

    def line(self) -> str:
        """For the log: everything in one line."""
        told = [f"{kind} {gib(self.held[kind])}" for kind in KINDS if self.held.get(kind)]
        return ", ".join([*told, f"of {gib(self.total)}"])


def gib(num_bytes: float) -> str:
    """Bytes for people: GiB, or MiB and KiB where they are few."""
    if abs(num_bytes) >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB" if abs(num_bytes) >= 1 << 20 else f"{num_bytes / 1024:.1f} KiB"
