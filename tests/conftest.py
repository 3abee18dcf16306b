"""What all tests share: the default model, GPU tests skipped without a GPU, the suite's time budget."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BUDGET_S = 25 * 60
_started = time.monotonic()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The embedded default model's GGUF file, brought once if it isn't there."""
    from octavo.models.pull import pull_default

    return Path(pull_default(progress=False))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for PyTorch: tiny models only lose by more, and ranks wait for each other's threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_terminal_summary(terminalreporter, exitstatus, config) -> None:
    seconds = time.monotonic() - _started
    slow = config.option.markexpr == "slow"
    if seconds > BUDGET_S and not slow and "PYTEST_XDIST_WORKER" not in os.environ:
        terminalreporter.write_line(
            f"the suite took {seconds:.0f} s, over its budget of {BUDGET_S} s: mark the slowest tests slow",
            yellow=True,
        )
