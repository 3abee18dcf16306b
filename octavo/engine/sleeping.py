"""An engine core that sleeps: its memory is given back, and taken again when it is woken up."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from octavo.engine.core import EngineCore
from octavo.errors import OctavoError
from octavo.messages import AddRequests, CoreOutput, SleepStatus

if TYPE_CHECKING:
    from octavo.engine.cores import Core

logger = logging.getLogger(__name__)

LEVELS = (1, 2)


class Sleeping:
    """Owns whether a core sleeps. While it does, its cache is empty and it takes no requests.

    Level 1 keeps the weights in host memory, level 2 reads them from the checkpoint again on waking up.
    """

    def __init__(self, core: Core):
        self._core = core
        self.level = 0  # 0: awake

    def sleep(self, level: int) -> SleepStatus:
        """Give memory back; refused while requests run."""
        core, begin = self._core, time.perf_counter()
        if level not in LEVELS:
            return self._status(error=f"level={level} is not valid: give 1 or 2")
        if self.level:
            return self._status(error=f"the engine sleeps already, at level {self.level}: wake it up first")
        if not isinstance(core, EngineCore):
            return self._status(error="an encoder cannot sleep: end its process instead")
        stats = core.stats()
        if stats.num_running or stats.num_waiting:
            running = stats.num_running + stats.num_waiting
            return self._status(error=f"{running} requests are under way: let them finish, or abort them")
        try:
            freed = core.sleep(level)
        except OctavoError as error:
            return self._status(error=str(error))
        self.level = level
        seconds = time.perf_counter() - begin
        logger.info("asleep at level %d: gave %.1f MB back in %.2f s", level, freed / 1e6, seconds)
        return SleepStatus(level, freed, seconds)

    def wake_up(self) -> SleepStatus:
        """Take the memory again; the engine sleeps on if there is too little."""
        core, begin = self._core, time.perf_counter()
        if not self.level:
            return self._status(error="the engine is awake")
        assert isinstance(core, EngineCore)
        try:
            core.executor.wake_up()
        except (OctavoError, MemoryError, RuntimeError) as error:  # PyTorch's lack of memory is the last kind
            logger.error("the engine cannot wake up", exc_info=error)
            return self._status(error=f"the engine cannot wake up: {error}".splitlines()[0])
        self.level = 0
        seconds = time.perf_counter() - begin
        logger.info("awake after %.2f s", seconds)
        return SleepStatus(seconds=seconds)

    def refused(self, message: AddRequests) -> list[CoreOutput]:
        """The ends of requests that came while the engine sleeps (front ends should not send any)."""
        text = "the engine sleeps: wake it up first"
        return [CoreOutput(r.request_id, finish_reason="error", error=text) for r in message.requests]

    def _status(self, error: str) -> SleepStatus:
        return SleepStatus(self.level, error=error)
