"""Profiles of a running engine core: a trace of some of its steps, and a page that sums it up."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.engine.trace_summary import STEP, read_trace, render_summary, summarize_trace
from octavo.messages import CoreOutput, ProfileStatus

if TYPE_CHECKING:
    from octavo.engine.cores import Core

logger = logging.getLogger(__name__)


class Profiler(Protocol):
    """What is asked of `octavo.worker.profiler.TorchProfiler`, and of what lets ranks record."""

    def start(self) -> None: ...

    def range(self, name: str) -> AbstractContextManager[object]: ...

    def stop(self, path: str | None) -> list[str]:
        """Writes the trace to `path`, and perhaps others beside it: the paths of all. None: writes none."""


def torch_profiler() -> Profiler:
    """The profiler of the steps that the calling thread launches."""
    from octavo.worker.profiler import TorchProfiler  # the workers' side is heavy to import

    return TorchProfiler()


class Profiling:
    """Profiles one core, on its thread, one profile at a time.

    Invariant: without a profile under way the core's steps are untouched. A profile ends when it is
    stopped or after `profiler_max_iterations` steps, whichever comes first, so that no trace grows without
    end.
    """

    def __init__(self, core: Core, make_profiler: Callable[[], Profiler] | None = None):
        """`make_profiler`: by default the core's executor's."""
        self._core = core
        self._make_profiler = make_profiler or core.executor.make_profiler
        self._profiler: Profiler | None = None
        self._steps = self._delay = 0
        self._done: ProfileStatus | None = None

    @property
    def running(self) -> bool:
        """Whether steps are to be run by `step`."""
        return self._profiler is not None

    def start(self) -> ProfileStatus:
        """Begin a profile; `error` of the answer says why there is none."""
        folder = self._core.config.torch_profiler_dir
        if folder is None:
            return ProfileStatus(error="torch_profiler_dir is not set: name a folder for traces at the start")
        if self._profiler is not None or self._done is not None:
            return ProfileStatus(error="a profile is under way already: stop it first")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            return ProfileStatus(error=f"torch_profiler_dir={folder!r} cannot be made: {error.strerror}")
        self._steps, self._delay = 0, self._core.config.profiler_delay_iterations
        self._profiler = self._make_profiler()
        if not self._delay and not self._begin():
            status, self._done = self._done, None
            assert status is not None
            return status
        return ProfileStatus()

    def step(self) -> list[CoreOutput]:
        """One step of the core, as part of the profile."""
        assert self._profiler is not None
        if self._delay:
            outputs = self._core.step()
            self._delay -= 1
            if not self._delay:
                self._begin()
            return outputs
        with self._profiler.range(STEP):
            outputs = self._core.step()
        self._steps += 1
        if self._steps >= self._core.config.profiler_max_iterations:
            self._finish()
        return outputs

    def stop(self) -> ProfileStatus:
        """End the profile and tell where its files are."""
        if self._profiler is not None:
            self._finish()
        status, self._done = self._done, None
        return status or ProfileStatus(error="no profile is under way: start one first")

    def close(self) -> None:
        """Stop recording; what was recorded is dropped."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None and not self._delay:
            self._core.wrap_stages(None)
            with contextlib.suppress(Exception):  # the device may have failed
                profiler.stop(None)

    def _begin(self) -> bool:
        """Start to record. If that fails there is no profile under way, and `stop` will say why."""
        assert self._profiler is not None
        profiler = self._profiler
        try:
            profiler.start()
        except Exception as error:  # of a device or a library; requests are none the worse for it
            self._profiler = None
            self._done = _lost("cannot be started", error)
            return False

        def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def ranged(*args: Any) -> Any:
                with profiler.range(f"octavo.{name}"):
                    return function(*args)

            return ranged

        self._core.wrap_stages(wrap)
        return True

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        if not self._delay:
            self._core.wrap_stages(None)
        if not self._steps:
            if not self._delay:
                with contextlib.suppress(Exception):  # there is nothing to lose
                    profiler.stop(None)
            self._done = ProfileStatus(error="the engine ran no step to record: nothing was written")
            return
        begin = time.monotonic()
        folder = self._core.config.torch_profiler_dir
        assert folder is not None
        try:
            trace = _free_path(Path(folder).resolve())
            written = profiler.stop(str(trace))
            summary = trace.with_name(trace.name.removesuffix(".json.gz") + ".txt")
            summary.write_text("\n".join(map(_page, written)))
        except Exception as error:  # a full disk shows as a trace that cannot be read back, for instance
            self._done = _lost("cannot be written", error)
            return
        logger.info("profile of %d steps: %s (%.1f s to write)", self._steps, trace, time.monotonic() - begin)
        self._done = ProfileStatus(str(trace), str(summary), self._steps, rank_traces=written[1:])


def _page(trace: str) -> str:
    """A trace summed up."""
    title = f"{Path(trace).name}: view it at https://ui.perfetto.dev"
    return render_summary(summarize_trace(read_trace(trace)), title)


def _lost(what: str, error: Exception) -> ProfileStatus:
    logger.error("the profile %s", what, exc_info=error)
    return ProfileStatus(error=f"the profile {what}: {str(error) or type(error).__name__}".splitlines()[0])


def _free_path(folder: Path) -> Path:
    """A name in the folder that no file has."""
    stem = f"octavo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for number in range(1 << 30):
        path = folder / (f"{stem}.json.gz" if not number else f"{stem}-{number}.json.gz")
        if not path.exists():
            return path
    raise AssertionError("unreachable")
