"""An engine core's process whose steps never return once a certain token is in a prompt.

`python -m tests.engine.hanging_core HOW FD`: the step sleeps ("sleep"), or turns round and round ("spin").
"""

from __future__ import annotations

import os
import sys
import time

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import PendingStep, UniprocExecutor
from octavo.engine.process import main
from octavo.step_messages import StepPlan

POISON = 99
SLOW = 98  # the first step with it takes `SLOW_SECONDS`, as if it compiled
SLOW_SECONDS = 3.0


class HangingExecutor(UniprocExecutor):
    def __init__(self, config: EngineConfig, how: str):
        super().__init__(config)
        self._how = how
        self._slow = False

    def execute(self, plan: StepPlan) -> PendingStep:
        prompts = [a.token_ids.tolist() for a in plan.admissions]
        if any(POISON in prompt for prompt in prompts):
            while True:
                time.sleep(1000 if self._how == "sleep" else 0)
        if any(SLOW in prompt for prompt in prompts) and not self._slow:
            self._slow = True
            time.sleep(SLOW_SECONDS)
        return super().execute(plan)


if __name__ == "__main__":
    code = main(int(sys.argv[2]), lambda config: EngineCore(config, HangingExecutor(config, sys.argv[1])))
    os._exit(code)
