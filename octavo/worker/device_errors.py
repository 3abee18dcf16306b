"""Telling a device that can run nothing more from a step that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from octavo.errors import EngineDeadError, first_line


def device_failed(error: RuntimeError) -> EngineDeadError:
    """What ends an engine whose device has failed."""
    return EngineDeadError(f"the device failed: {first_line(error)}")


@contextlib.contextmanager
def noticing_death() -> Iterator[None]:
    """Around what launches work: other errors than a dead device's pass unchanged.

    Raises:
        EngineDeadError: the device can run nothing more.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "CUDA error" in str(error):  # sticky: every later call fails as well
            raise device_failed(error) from error
        raise
