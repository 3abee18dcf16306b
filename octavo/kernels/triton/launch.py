"""Launching Triton kernels with little host time.

Triton's own launch binds and classifies every argument anew, which takes tens of microseconds on a
slow host: more than most kernels run. A `Launcher` remembers the compiled kernel by what Triton
specializes on (dtypes, 16-byte alignment of pointers, values of integers, constants) and calls it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Grid = tuple[int, int, int]


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least `n` (1 for less)."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


@functools.cache
def overlaps(device: int) -> bool:
    """Whether kernels on a device (negative: the CPU) may be started before the one ahead of them ends."""
    return device >= 0 and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Lets the next kernel be started. Every program must still call `await_previous`."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Waits until the kernel before has written its results."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Lets the next kernel be started, and waits until the one before has written its results."""
    let_next_start(OVERLAP)
    await_previous(OVERLAP)


@triton.jit
def prefetch_l2(at, size):
    """Sends for `size` bytes (a multiple of 16, or 0) at each of these addresses (likewise) into the L2
    cache. A tensor with an element for each thread sends for each once, where one of fewer elements would for
    each thread's copy."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [at, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


Instead = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_instead: Instead | None = None


@contextlib.contextmanager
def instead_of_launches(take: Instead) -> Iterator[None]:
    """In this context kernels are not launched: `take(kernel, arguments, options)` gets what would be, each
    time that a launcher meets a variant for the first time. Options are `num_warps` and Triton's others."""
    global _instead
    _instead = take
    try:
        yield
    finally:
        _instead = None
        for launcher in Launcher.all:
            launcher.forget_taken()


class _Taken:
    """In the place of a compiled kernel: launches nothing."""

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return lambda *args: None


_TAKEN = _Taken()


class Launcher:
    """One kernel with its compiled variants.

    The kernel's parameters are, in this order: tensors, integers it is specialized on, scalars it is
    not (floats, and integers under `do_not_specialize`), constants.

    With `overlap` its last constant is OVERLAP, and where the device can (from Hopper on) it is started
    while the kernel before it on the stream still runs (programmatic dependent launch). Every program
    must then call `wait_for_previous(OVERLAP)` before it touches anything that is written on the stream;
    after that the kernel before is complete, and so, by its own wait, is every earlier one.

    What may be read before the wait, beside what no kernel writes: kernels begin in the order of the stream,
    and one that is not started early (any of PyTorch's) begins when all before it are complete. So whatever
    begins behind such a kernel finds written what was to be written before that one.

    `options` are Triton's for compilation (`enable_fp_fusion`, …).
    """

    all: ClassVar[list[Launcher]] = []

    def __init__(self, kernel: Any, overlap: bool = False, **options: Any):
        self.kernel = kernel
        self.overlap = overlap
        self.options = options
        self._compiled: dict[tuple[Any, ...], Any] = {}
        Launcher.all.append(self)

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        integers: tuple[int, ...],
        scalars: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launches on the current stream; compiles a variant that is met for the first time."""
        device = tensors[0].get_device()
        if self.overlap:
            constants = (*constants, overlaps(device))
        key = (
            device,
            num_warps,
            integers,
            constants,
            *[(t.dtype, t.data_ptr() % 16 == 0) for t in tensors],
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *integers, *scalars, *constants)
            return
        options = {"num_warps": num_warps, **self.options}
        if self.overlap and overlaps(device):
            options["launch_pdl"] = True
        args = (*tensors, *integers, *scalars, *constants)
        if _instead is not None:
            _instead(self.kernel, args, options)
            self._compiled[key] = _TAKEN
            return
        compiled = self.kernel[grid](*args, **options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled

    def forget_taken(self) -> None:
        """Forget the variants that `instead_of_launches` took."""
        self._compiled = {key: kernel for key, kernel in self._compiled.items() if kernel is not _TAKEN}
