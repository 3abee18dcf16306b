"""What scripts that time kernels on a GPU share: variants that are compiled ahead, calls timed in graphs."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable
from multiprocessing.pool import AsyncResult, Pool
from typing import Any, TypeVar

import torch
from compile_only import compile_only

ROTATION_BYTES = 256 << 20
"""Of different weights that calls read in turn: several times the L2."""
SHARED_BYTES = 227 << 10
"""What a program may have of a multiprocessor's shared memory (Hopper)."""
Cut = TypeVar("Cut")


# ---- compilation ----


def add_processes(parser: argparse.ArgumentParser) -> None:
    """The option of how many processes compile."""
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1), help="that compile")


def compilers(processes: int) -> Pool:
    """Processes that compile: forked, so make them before this one touches the device; they never do."""
    return multiprocessing.get_context("fork").Pool(processes)


def device() -> tuple[Any, int]:
    """Properties of the GPU, and its compute capability (90 for 9.0)."""
    properties = torch.cuda.get_device_properties(0)
    return properties, properties.major * 10 + properties.minor


@functools.cache
def become_compiler(capability: int) -> None:
    """From here on this process compiles what it launches, on one thread, and runs nothing."""
    torch.set_num_threads(1)
    compile_only(capability)


def compile_variant(capability: int, name: object, launch: Callable[[], Any]) -> str | None:
    """Launch something in a compiling process, so that it lies in Triton's cache; returns what went wrong."""
    become_compiler(capability)
    try:
        launch()
    except Exception as error:
        lines = str(error).splitlines()
        return f"{name}: {type(error).__name__}: {lines[0] if lines else ''}"
    return None


def problems(compiling: AsyncResult[list[str | None]], seconds: float) -> list[str] | None:
    """What went wrong in jobs of `compile_variant`; None: they are not done within the time."""
    try:
        return [problem for problem in compiling.get(timeout=seconds) if problem]
    except multiprocessing.TimeoutError:
        return None


# ---- measurement ----


class Clock:
    """Times calls in graphs, which share their memory.

    Attributes:
        stream: on which everything runs.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        # A graph of its own keeps the memory that all the others share.
        self._anchor = self._record(lambda: torch.zeros(1, device="cuda"))

    def _record(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def seconds(self, call: Callable[[int], Any], places: int, count: int, replays: int = 3) -> float:
        """Of one of `count` calls in a graph, the least of some replays.

        Args:
            call: told its place, of `places` in turn, so that it reads other memory than the one before.
            replays: that are timed, after one that is not.
        """

        def work() -> None:
            for i in range(count):
                call(i % places)

        with torch.cuda.stream(self.stream):
            call(0)
        self.stream.synchronize()
        graph = self._record(work)
        times = []
        with torch.cuda.stream(self.stream):
            graph.replay()
            for _ in range(replays):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3 / count)
        return min(times)


def fastest(
    cuts: Iterable[Cut],
    seconds: Callable[[Cut], float],
    where: str = "",
    late: Callable[[], bool] = lambda: False,
) -> list[tuple[float, Cut]]:
    """Seconds and cuts, the least first, without those that the device cannot run.

    Args:
        seconds: times a cut.
        where: what comes before a cut in what is printed of one that fails.
        late: whether to end with what there is.
    """
    found = []
    for cut in cuts:
        if late():
            break
        try:
            found.append((seconds(cut), cut))
        except Exception as error:
            if "CUDA error" in str(error):  # after which nothing works any more
                raise
            if "out of resource" not in str(error):
                print(f"    {where}{cut}: {type(error).__name__}: {error}", flush=True)
    return sorted(found, key=lambda one: one[0])
