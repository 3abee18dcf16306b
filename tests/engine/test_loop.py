"""The loop around an engine core."""

from __future__ import annotations

import queue
import random

from octavo.engine.core import EngineCore
from octavo.engine.loop import run_core
from octavo.messages import AddRequests, CoreOutputs, CoreStats, Shutdown, ToCore
from tests.engine.simulation import make_core, request


class Script:
    """An inbox of one message. The core is shut down when it would rest; `stats` are its figures then."""

    def __init__(self, core: EngineCore, message: ToCore):
        self._core, self._messages = core, [message]
        self.stats = CoreStats()

    def get(self) -> ToCore:
        if self._messages:
            return self._messages.pop()
        self.stats = self._core.stats()
        return Shutdown()

    def get_nowait(self) -> ToCore:
        raise queue.Empty


def test_what_comes_after_the_last_answer_is_told_before_the_core_rests():
    draw = random.Random(1)
    prompts = [[draw.randrange(1000) for _ in range(150)] for _ in range(6)]
    core = make_core(num_blocks=60, num_host_blocks=500, max_num_seqs=1)
    core.executor.host.delay = lambda: 5  # copies that last
    script = Script(core, AddRequests([request(str(i), prompt, 2) for i, prompt in enumerate(prompts)]))
    told: list[CoreOutputs] = []
    run_core(core, script, told.append)
    assert not told[-1].outputs and script.stats.host_blocks_out > 0
    assert told[-1].stats == script.stats
