"""Work that takes long and cannot be interrupted, beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_aside(make: Callable[[], T], discard: Callable[[T], None]) -> T:
    """Call `make` on a thread for which neither loop nor process waits at its end: a download takes long.

    Args:
        discard: takes, on some thread, what is made once the caller has been cancelled.
    """
    loop = asyncio.get_running_loop()
    made: asyncio.Future[T] = loop.create_future()

    def settle(value: T) -> None:
        if made.done():  # cancelled
            threading.Thread(target=discard, args=(value,), daemon=True).start()
        else:
            made.set_result(value)

    def fail(error: BaseException) -> None:
        if not made.done():
            made.set_exception(error)

    def run() -> None:
        try:
            value = make()
        except BaseException as error:
            _tell(loop, fail, error)
        else:
            if not _tell(loop, settle, value):
                discard(value)

    threading.Thread(target=run, name="octavo-aside", daemon=True).start()
    return await made


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[T], None], value: T) -> bool:
    """Call something on the loop's thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, value)
    except RuntimeError:
        return False
    return True
