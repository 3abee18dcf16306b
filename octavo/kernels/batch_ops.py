"""The kernels that prepare a step, by device: C++, Triton or plain PyTorch, all of one signature."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from octavo.kernels import reference_batch, reference_drafts


class BatchKernels(NamedTuple):
    """One implementation; see `octavo.kernels.reference_batch` for what each does."""

    gather_rows: Callable[..., None]
    map_blocks: Callable[..., None]
    append_tokens: Callable[..., None]


@functools.cache
def batch_kernels(device_type: str) -> BatchKernels:
    """The fastest that a device type ("cpu", "cuda", …) has; `octavo.kernels.ops` says in the log
    where its kernels cannot be had."""
    module: Any = reference_batch
    if device_type == "cpu":
        if importlib.import_module("octavo.kernels.cpu.ops").available():
            module = importlib.import_module("octavo.kernels.cpu.batch")
    elif device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        module = importlib.import_module("octavo.kernels.triton.batch")
    return BatchKernels(module.gather_rows, module.map_blocks, module.append_tokens)


class DraftKernels(NamedTuple):
    """What recorded steps judge and prepare drafts with; see `octavo.kernels.reference_drafts`."""

    judge_drafts: Callable[..., None]
    stands_by_chance: Callable[..., None]
    begin_follow: Callable[..., None]
    begin_chain: Callable[..., None]
    place_rows: Callable[..., None]
    append_drafts: Callable[..., None]


@functools.cache
def draft_kernels(device_type: str) -> DraftKernels:
    """Triton's on a GPU. Elsewhere nothing is recorded, and they are the plain ones, for tests."""
    module: Any = reference_drafts
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        module = importlib.import_module("octavo.kernels.triton.drafts")
    return DraftKernels(*(getattr(module, name) for name in DraftKernels._fields))
