"""Long work on a thread of its own: results, errors, and what comes too late."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.engine.aside import run_aside


def test_results_and_errors_come_back() -> None:
    async def main() -> None:
        assert await run_aside(lambda: 5, pytest.fail) == 5
        with pytest.raises(ZeroDivisionError):
            await run_aside(lambda: 1 // 0, pytest.fail)

    asyncio.run(main())


@pytest.mark.parametrize("loop_ends_first", [False, True])
def test_what_comes_too_late_is_discarded(loop_ends_first: bool) -> None:
    go, gone, late = threading.Event(), threading.Event(), []

    def make() -> str:
        assert go.wait(10)
        return "made"

    def discard(value: str) -> None:
        late.append(value)
        gone.set()

    async def main() -> None:
        task = asyncio.ensure_future(run_aside(make, discard))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if not loop_ends_first:
            go.set()
            while not late:
                await asyncio.sleep(0.01)

    asyncio.run(main())  # which ends, whatever is still being made
    go.set()
    assert gone.wait(10) and late == ["made"]
