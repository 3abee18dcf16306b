"""A worker's memory behind the device's KV cache: the host tier, the disk behind it, and steps that copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from octavo.config import EngineConfig
from octavo.kv.disk_store import DiskStore
from octavo.step_messages import StepPlan, StepResult, TokenMasks
from octavo.worker.device_errors import device_failed
from octavo.worker.host_cache import HostCache
from octavo.worker.host_memory import GIB

# A step that has nothing to do but to wait for copies waits no longer, so that new requests can come in.
_LONGEST_WAIT = 0.01
_LOOK_AGAIN = 0.0002


class Launched(Protocol):
    """A step on its way."""

    def sample(self, masks: TokenMasks) -> None:
        """Draw tokens under masks, where the plan has `masked` requests."""

    def wait(self) -> StepResult:
        """Block until its results are here."""


class KVTiers:
    """Owns the host tier, and the disk tier if there is one; wraps a runner's steps so that they copy too.

    Attributes:
        host: the slots and copies.
        store: blocks on disk, or None.
    """

    def __init__(
        self, config: EngineConfig, caches: Sequence[torch.Tensor], agree: Callable[[int], int] = int
    ):
        """Allocate the host tier.

        Args:
            agree: gives all ranks the smallest of their numbers.

        Raises:
            ConfigError: more than is free, or less than a block.
        """
        self._config = config
        self.host = HostCache(caches, int(config.swap_space * GIB), config.num_ranks, agree)
        self.store: DiskStore | None = None

    def open_store(self, root: bytes) -> None:
        """Open the disk tier, if it is asked for, for blocks whose keys begin at `root`.

        Raises:
            ConfigError: a folder or size that cannot work.
        """
        config = self._config
        if config.kv_disk_path is not None:
            size = int(config.kv_disk_size * GIB)
            self.store = DiskStore(config.kv_disk_path, size, root, self.host.page, self.host.page_bytes)

    def describe(self) -> dict[str, str]:
        """Lines for the log."""
        lines = {"host tier": self.host.describe()}
        if self.store is not None:
            stats = self.store.stats()
            lines["disk tier"] = (
                f"{self.store.folder} ({stats.blocks} blocks, {stats.num_bytes / GIB:.2f} GiB)"
            )
        return lines

    def execute(self, plan: StepPlan, run: Callable[[StepPlan], Launched]) -> Launched:
        """Launch a plan's copies, and its step with `run` if it has rows. Results come in order.

        Raises:
            ValueError: a plan that enters requests or blocks into the tables and computes nothing.
        """
        for copies in plan.copies:
            self.host.launch(copies)
        if len(plan.slots):
            return _StepBesideCopies(run(plan), self.host)
        if plan.admissions or any(len(update.slots) for update in plan.block_updates):
            raise ValueError(f"step {plan.step_id} has admissions or block updates, and no rows")
        return _CopiesAlone(self)

    def close(self) -> None:
        """End threads and copies, free the memory."""
        if self.store is not None:
            self.store.close()
        self.host.close()


class _StepBesideCopies:
    """A step; its result also tells which copies ended."""

    def __init__(self, step: Launched, host: HostCache):
        self._step = step
        self._host = host

    def sample(self, masks: TokenMasks) -> None:
        """See `Launched`."""
        self._step.sample(masks)

    def wait(self) -> StepResult:
        """See `Launched`."""
        result = self._step.wait()
        result.copies_done, result.copies_failed = _poll(self._host)
        return result


class _CopiesAlone:
    """A step without rows: its result comes when there is news of copies, or of the disk."""

    def __init__(self, tiers: KVTiers):
        self._host, self._store = tiers.host, tiers.store

    def sample(self, masks: TokenMasks) -> None:
        """There is nothing to draw."""
        raise ValueError("a step without rows has no tokens to draw")

    def wait(self) -> StepResult:
        """See `Launched`."""
        result = StepResult.without_tokens(0)
        end = time.monotonic() + _LONGEST_WAIT
        while True:
            result.copies_done, result.copies_failed = _poll(self._host)
            left = end - time.monotonic()
            if result.copies_done or result.copies_failed or left <= 0:
                return result
            if not self._host.busy and self._store is None:
                return result
            pause = _LOOK_AGAIN if self._host.busy else left
            if self._store is None:
                time.sleep(pause)
            elif self._store.wait(pause):
                return result


def _poll(host: HostCache) -> tuple[list[int], list[int]]:
    try:
        return host.poll()
    except RuntimeError as error:
        raise device_failed(error) from error


def prefill_rate(
    execute: Callable[[StepPlan], Launched],
    plan: StepPlan,
    agree: Callable[[int], int] = int,
    enough: float = 0.5,
) -> float:
    """Tokens per second of a step that computes prompts.

    The first run also pays for what is done once; a second tells, unless the first took `enough` seconds.

    Args:
        agree: gives all ranks the smallest of their numbers: they run as many steps.
    """
    for _ in range(2):
        begin = time.perf_counter()
        execute(plan).wait()
        seconds = time.perf_counter() - begin
        if not agree(seconds <= enough):
            break
    return plan.total_rows / seconds
