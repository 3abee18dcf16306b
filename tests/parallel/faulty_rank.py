"""A rank that fails or hangs at certain tokens of prompts: run in the place of `octavo.parallel.rank`."""

from __future__ import annotations

import os
import sys
import time

from octavo.parallel import rank
from octavo.step_messages import StepPlan

FAILS_EVERYWHERE, FAILS_ON_ONE, HANGS_ON_ONE = 5, 13, 15  # in no prompt of tests.tiny, nor in what follows it


def main() -> int:
    from octavo.worker.worker import Worker

    execute = Worker.execute

    def faulty(self: Worker, plan: StepPlan):  # type: ignore[no-untyped-def]
        found = {int(token) for admission in plan.admissions for token in admission.token_ids}
        if FAILS_EVERYWHERE in found:
            raise ValueError("this token cannot be computed")
        if self.group.rank == 1 and FAILS_ON_ONE in found:
            raise ValueError("this token cannot be computed here")
        if self.group.rank == 1 and HANGS_ON_ONE in found:
            time.sleep(3600)
        return execute(self, plan)

    Worker.execute = faulty  # type: ignore[method-assign]
    return rank.main(int(sys.argv[1]))


if __name__ == "__main__":
    os._exit(main())
