"""A profile where ranks run the steps: a trace of each rank, and one of the engine's thread."""

from __future__ import annotations

import contextlib
import gzip
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from octavo.parallel.wire import StartTrace, StopTrace, ToRank


class RanksProfiler:
    """Lets every rank record its steps; the engine, which runs no operators, notes its ranges itself."""

    def __init__(self, ask: Callable[[ToRank], object], num_ranks: int):
        """`ask` sends a message to all ranks, waits until it is done, and raises what one could not do."""
        self._ask = ask
        self._num_ranks = num_ranks
        self._events: list[dict[str, Any]] = []

    def start(self) -> None:
        """Begin to record.

        Raises:
            OctavoError, RuntimeError: a rank cannot; none records then.
        """
        self._events = []
        try:
            self._ask(StartTrace())
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self._ask(StopTrace())
            raise

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A named range of the engine's trace."""
        begin = time.time_ns()
        try:
            yield
        finally:
            self._events.append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": name,
                    "pid": os.getpid(),
                    "tid": threading.get_native_id(),
                    "ts": begin / 1e3,
                    "dur": (time.time_ns() - begin) / 1e3,
                }
            )

    def stop(self, path: str | None) -> list[str]:
        """Stop recording, and write the traces (`path` ends in `.json.gz`); returns their paths, the engine's
        first, then each rank's.

        Raises:
            OSError, OctavoError, RuntimeError: they cannot be written.
        """
        if path is None:
            self._ask(StopTrace())
            return []
        stem = path.removesuffix(".json.gz")
        ranks = [f"{stem}-rank{number}.json.gz" for number in range(self._num_ranks)]
        self._ask(StopTrace(ranks))
        with gzip.open(path, "wb") as file:
            file.write(msgspec.json.encode({"traceEvents": self._events}))
        return [path, *ranks]
