"""Compiling kernels for a GPU that is not at hand, several at once, into Triton's cache.

A kernel takes 0.1 to 3.5 s on one core: Python until its first intermediate form (0.03 to 0.2 s), then MLIR,
LLVM, ptxas and a C compiler (for the function that launches it), which all leave Python free. So threads do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils, library_dirs
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import triton_key


class _Driver:
    """Answers what compilation asks of a driver."""

    def __init__(self, capability: int):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled(NamedTuple):
    """A kernel that was compiled; `begin` and `end` in seconds since the epoch."""

    name: str
    begin: float
    end: float


class CompilePool:
    """Threads that compile. What they do is lost on whoever launches nothing in another process.

    Attributes:
        compiled: kernels that are done.
        errors: of those that failed, in one line each.
    """

    def __init__(self, capability: int, threads: int):
        """Make this process compile for a compute capability (90 for 9.0); it can launch nothing any more."""
        driver.set_active(_Driver(capability))
        self.compiled: list[Compiled] = []
        self.errors: list[str] = []
        self._threads = ThreadPoolExecutor(threads, "octavo-compile")
        self._futures: list[Future[None]] = []
        self._mode = triton.AsyncCompileMode(self)
        self._builds_launchers = _has_libcuda()

    def take(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile what `kernel` becomes for these arguments, soon; see `launch.instead_of_launches`."""
        token = _active_mode().set(self._mode)
        try:
            kernel.run(*args, grid=(1, 1, 1), warmup=True, **options)
        except Exception as error:
            self.errors.append(_line(kernel.__name__, error))
        finally:
            _active_mode().reset(token)

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[None]:
        """Called by Triton, once for each variant."""
        future = self._threads.submit(self._build, compile_kernel)
        self._futures.append(future)
        return future

    def wait(self) -> None:
        """Until all that was taken is done."""
        wait(self._futures)
        self._futures.clear()

    def _build(self, compile_kernel: Callable[[], Any]) -> None:
        begin, name = time.time(), "kernel"
        try:
            kernel = compile_kernel()
            name = kernel.name
            if self._builds_launchers:
                CudaLauncher(kernel.src, kernel.metadata)
            self.compiled.append(Compiled(name, begin, time.time()))
        except Exception as error:
            self.errors.append(_line(name, error))


def _active_mode() -> Any:
    from triton.runtime._async_compile import active_mode

    return active_mode


def _line(name: str, error: Exception) -> str:
    return f"{name}: {type(error).__name__}: {error}".splitlines()[0]


def _has_libcuda() -> bool:
    try:
        library_dirs()
    except (AssertionError, OSError):  # as Triton says it
        return False
    return True


def prepare_compiler(utilities: bool = False) -> None:
    """Do once what Triton does before the first kernel of a process: hash the compiler, a file of 400 MB.

    Args:
        utilities: also build the C functions through which Triton loads kernels, where CUDA's driver is.
    """
    triton_key()
    if utilities and _has_libcuda():
        CudaUtils()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """In this context the part of compilations that is Python takes turns, first come, first served: those
    that came first go on to what runs in parallel instead of all being slow."""
    turn, make_ir = threading.Lock(), ASTSource.make_ir

    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with turn:
            return make_ir(self, *args, **kwargs)

    ASTSource.make_ir = in_turn
    try:
        yield
    finally:
        ASTSource.make_ir = make_ir
