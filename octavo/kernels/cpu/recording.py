"""Work of the CPU kernels, recorded once and run again without the Python between: what graphs are to a GPU.

A decode step of a small model is some two hundred kernels of ten microseconds, and as much Python. Run again,
it is one call, through which the threads stay awake (see record.h and team.h).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from octavo.kernels.cpu.lending import ALLOCATE, Seen
from octavo.kernels.cpu.ops import library
from octavo.kernels.cpu.step_memory import Lender, StepMemory, can_lend

Result = TypeVar("Result")

# PyTorch's operations that may stand between kernels. Views of memory need nothing done again; the others,
# functions of their tensors alone, run again into the memory of their first result.
_VIEW = (
    *("alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select", "slice", "split"),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"),
    *("_reshape_alias", "flatten", "unflatten", "reshape", "contiguous", "to"),
)
_COMPUTE = (
    *("add", "addmm", "clone", "embedding", "linear", "matmul", "mm", "mul", "_linear_pointwise", "_to_copy"),
)


class _Watch(Seen):
    """Sees PyTorch's operations: lends them memory, keeps those to run again with their place among calls."""

    def __init__(self, size: Callable[[], int], memory: StepMemory):
        super().__init__()
        self.kept: list[torch.Tensor] = []  # what nobody can lend memory
        self.operations: list[tuple[int, Callable[[], torch.Tensor], torch.Tensor]] = []
        self.problem: str | None = None
        self._size = size
        self._memory, self._lender = memory, Lender(memory)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place, out = self._size(), func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name in ALLOCATE:
            out = self._lend(out)
        elif name in _VIEW and _share_memory(_tensors((out,)), _tensors(args)):
            pass
        elif name in (*_VIEW, *_COMPUTE) and isinstance(out, torch.Tensor) and "out" not in kwargs:
            # Also a "view" that had to copy.
            made, out = out, self._lend(out)
            if out is not made:
                out.copy_(made)
            lasting = self._memory.lasting
            args, kwargs = tree_map_only(torch.Tensor, lasting, (args, kwargs))
            self.operations.append((place, functools.partial(func, *args, **kwargs), lasting(out)))
        else:
            self.problem = self.problem or str(func)
        return out

    def _lend(self, x: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of this shape and type, which it leaves once nobody holds it."""
        if can_lend(x):
            return self._lender.empty(x.shape, x.stride(), x.dtype)
        self.kept.append(x)
        return x


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


def _share_memory(results: list[torch.Tensor], given: list[torch.Tensor]) -> bool:
    places = {x.untyped_storage().data_ptr() for x in given}
    return all(x.untyped_storage().data_ptr() in places for x in results)


class Recording:
    """Kernels and operations of a piece of work, in order, on the memory that it used.

    Make it by `record`. What the work read but did not allocate (weights, caches, the buffers of a step's
    inputs) must outlive it and stay where it was.
    """

    def __init__(self, memory: StepMemory) -> None:
        lib = library()
        self._calls = lib.octavo_recording_begin()
        self._replay = lib.octavo_recording_replay
        self._free = weakref.finalize(self, lib.octavo_recording_free, self._calls)
        self._chunks = memory.chunks  # where the work's tensors lie
        self._watch = _Watch(lambda: lib.octavo_recording_size(self._calls), memory)
        self._parts: list[tuple[int, int, Callable[[], torch.Tensor] | None, torch.Tensor | None]] = []

    def _do(self, work: Callable[[], Result]) -> Result:
        lib = library()
        try:
            with self._watch:
                result = work()
        finally:
            status = lib.octavo_recording_end(self._calls)
        if self._watch.problem is None and status:
            self._watch.problem = "a kernel whose arguments are one step's"
        first = 0
        for place, operation, out in self._watch.operations:
            self._parts.append((first, place, operation, out))
            first = place
        self._parts.append((first, lib.octavo_recording_size(self._calls), None, None))
        return result

    @property
    def problem(self) -> str | None:
        """Why the work cannot be run again; None: it can."""
        return self._watch.problem

    def __len__(self) -> int:
        """Calls of kernels and operations of PyTorch."""
        return self._parts[-1][1] + len(self._parts) - 1

    def replay(self) -> None:
        """Do the work again, on what lies now where its inputs lay; results take the place of the last."""
        threads = torch.get_num_threads()
        for first, last, operation, out in self._parts:
            if last > first and self._replay(self._calls, first, last, threads):
                raise RuntimeError("a recorded kernel refused its arguments")
            if operation is not None:
                assert out is not None
                out.copy_(operation())


def record(work: Callable[[], Result], memory: StepMemory | None = None) -> tuple[Result, Recording]:
    """Do a piece of work and note what it does.

    Args:
        memory: for what the work allocates. Other recordings may use it too: whichever is made or run next
            overwrites the result, and whatever else the work may have kept. None: memory of its own.
        work: that calls kernels of this package and the PyTorch operations of `_COMPUTE`, on tensors alone:
            what it decides by their values, or by numbers that change, stays decided.

    Returns:
        Its result, and the recording; see there whether it can be `replay`ed.
    """
    recording = Recording(StepMemory() if memory is None else memory)
    return recording._do(work), recording
