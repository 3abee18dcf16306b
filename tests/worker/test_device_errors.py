"""What ends an engine, and what only a step."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import EngineDeadError
from octavo.worker.device_errors import noticing_death
from octavo.worker.transfer import wait_for

DEAD = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`")
TOLD = "^the device failed: CUDA error: an illegal memory access was encountered$"


def raises(error: Exception):
    with noticing_death():
        raise error


def test_a_device_that_can_run_nothing_more_is_told_in_one_line():
    with pytest.raises(EngineDeadError, match=TOLD):
        raises(DEAD)


class Event:
    def synchronize(self):
        raise DEAD


def test_so_is_one_that_fails_while_it_is_waited_for():
    with pytest.raises(EngineDeadError, match=TOLD):
        wait_for(None, Event())


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA error: out of memory"), RuntimeError("shapes differ"), ValueError("no")],
)
def test_what_a_smaller_step_may_survive_stays_as_it_is(error):
    with pytest.raises(type(error)) as raised:
        raises(error)
    assert raised.value is error
