"""Questions to an engine core, from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from octavo.errors import EngineDeadError

_Answer = TypeVar("_Answer")


class Question(Generic[_Answer]):
    """A kind of message that the core answers: one at a time, on the event loop."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[_Answer | EngineDeadError] = asyncio.Queue()
        self._turn = asyncio.Lock()

    @property
    def waiting(self) -> bool:
        """Whether an answer is due."""
        return self._turn.locked()

    async def ask(self, send: Callable[[], None]) -> _Answer:
        """Send the message and wait for its answer.

        Raises:
            EngineDeadError: the engine has ended.
        """

        async def ask() -> _Answer:
            async with self._turn:
                # An engine that died told it to all questions, asked or not.
                while not self.answers.empty():
                    self.answers.get_nowait()
                send()
                answer = await self.answers.get()
            if isinstance(answer, EngineDeadError):
                raise answer
            return answer

        # A caller that goes away must not leave the answer for the next one.
        return await asyncio.shield(ask())
