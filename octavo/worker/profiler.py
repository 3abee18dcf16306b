"""PyTorch's profiler around the work of one thread, written as a trace for Perfetto."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class TorchProfiler:
    """Records the operators that the calling thread runs and the kernels that they launch.

    Every method must be called on the thread that launches the work: PyTorch's callbacks are the
    thread's own.
    """

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Begin to record.

        Raises:
            RuntimeError: the process is recorded already; two profiles would spoil each other.
        """
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("a profiler of PyTorch records this process already: end it first")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # work of the steps before is none of this profile's
        self._profile.start()

    def range(self, name: str) -> AbstractContextManager[object]:
        """A named range of the trace."""
        return record_function(name)

    def stop(self, path: str | None) -> list[str]:
        """Wait for what was launched, stop recording, and write the trace (`.json` or `.json.gz`) to `path`,
        which is returned.

        Raises:
            OSError, RuntimeError: it cannot be written.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        if path is None:
            return []
        self._profile.export_chrome_trace(path)
        return [path]
