"""What the engine may ask of a tier behind host memory: blocks by key, moved to and from host slots.

The device's blocks and the host's slots are in the engine's books (`kv.pool`, `kv.host_tier`) and move by
`step_messages.BlockCopies`. A tier behind them keeps books of its own, since others may use it too (another
engine on the same folder, an earlier run of this one), so that the engine asks it by key. Where blocks
lie is the worker's business: a store reads and writes *host slots*, the memory that `BlockCopies` fills and
empties. With one worker in the engine's process the store is the worker's own object
(`Executor.block_store`). With ranks, each has a store for its part of a block; what the executor then gives
the engine is a store that passes these calls on as messages, has a block where every rank has it, and ends
a ticket when all of them have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass
class StoreStats:
    """What a store holds, and counters of what it did, which only grow.

    Attributes:
        blocks, num_bytes: what it holds now, of this engine and of others.
        hits, written: blocks read and written.
        bytes_read, bytes_written: the same in bytes.
        corrupt: blocks dropped since their checksum, size or header was wrong.
        failed_reads, failed_writes: blocks that could not be read (corrupt and vanished ones included) or
            written (full, read-only).
        evicted: blocks dropped for room.
    """

    blocks: int = 0
    num_bytes: int = 0
    hits: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    corrupt: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    evicted: int = 0


class BlockStore(Protocol):
    """Blocks by (KV group, block key). No call waits for the storage, and none but `close` raises for what
    goes wrong there: that ends a ticket with False, and the block is recomputed.

    A slot named by a ticket belongs to the store until the ticket is polled: whoever calls holds it, neither
    overwriting nor reusing it. Before `write` the slot must be filled (the `BlockCopies` into it done).
    After a `read` that ended with False the slot holds garbage.
    """

    @property
    def num_blocks(self) -> int:
        """How many it can hold."""

    def contains(self, group: int, key: bytes) -> bool:
        """Whether a block seems to be there. A hint: a read may still fail."""

    def read(self, group: int, key: bytes, slot: int) -> int:
        """Begin to copy a block into a host slot; returns the ticket. Reads go before writes."""

    def write(self, group: int, key: bytes, slot: int, rank: int | None = None) -> int:
        """Begin to keep a block that is in a host slot; returns the ticket. One that is there already is
        not written again. Private keys (prefix caching off) are not to be written.

        Args:
            rank: how many of the blocks that are written with a rank were used later, for a restart to know.
        """

    def poll(self) -> list[tuple[int, bool]]:
        """Tickets that ended since the last call, and whether well."""

    def wait(self, timeout: float) -> bool:
        """Block until `poll` has something to say, or `timeout` seconds; returns whether it has."""

    def stats(self) -> StoreStats:
        """Counters now."""

    def close(self) -> None:
        """End what is under way and release threads; what is on disk stays."""
