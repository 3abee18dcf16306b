"""A rank that fails or hangs at certain tokens of prompts: run in the place of `octavo.parallel.rank`."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from octavo.parallel import rank
from octavo.step_messages import StepPlan

FIRST_STAGE_FAILS = 3  # where a prompt begins with it; the last stage takes its time
FAILS_EVERYWHERE, FAILS_ON_ONE, HANGS_ON_ONE = 5, 13, 15  # in no prompt of tests.tiny, nor in what follows it


def main() -> int:
    from octavo.worker.model_runner import ModelRunner
    from octavo.worker.stage_runner import StageRunner
    from octavo.worker.worker import Worker

    execute, execute_last, run_first, sleep = (
        Worker.execute,
        ModelRunner._execute,
        StageRunner._run,
        Worker.sleep,
    )

    def faulty(self: Worker, plan: StepPlan):  # type: ignore[no-untyped-def]
        found = {int(token) for admission in plan.admissions for token in admission.token_ids}
        if FAILS_EVERYWHERE in found:
            raise ValueError("this token cannot be computed")
        if self.group.rank == 1 and FAILS_ON_ONE in found:
            raise ValueError("this token cannot be computed here")
        if self.group.rank == 1 and HANGS_ON_ONE in found:
            time.sleep(3600)
        return execute(self, plan)

    def begins_badly(plan: StepPlan) -> bool:
        return any(admission.token_ids[0] == FIRST_STAGE_FAILS for admission in plan.admissions)

    def failing(self: StageRunner, plan: StepPlan):  # type: ignore[no-untyped-def]
        if begins_badly(plan):
            raise ValueError("this prompt cannot be computed")
        return run_first(self, plan)

    def slow(self: ModelRunner, plan: StepPlan):  # type: ignore[no-untyped-def]
        if begins_badly(plan):
            time.sleep(3)
        return execute_last(self, plan)

    def silent(self: Worker, level: int) -> int:
        if self.group.rank == 1:
            ctypes.PyDLL(None).sleep(5)  # a library that holds the interpreter
        return sleep(self, level)

    Worker.execute = faulty  # type: ignore[method-assign]
    StageRunner._run = failing  # type: ignore[method-assign]
    ModelRunner._execute = slow  # type: ignore[method-assign]
    Worker.sleep = silent  # type: ignore[method-assign]
    return rank.main(int(sys.argv[1]))


if __name__ == "__main__":
    os._exit(main())
