"""Results of one request on their way to its reader, few in number however slowly it reads."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence
from typing import Generic, TypeVar

from octavo.outputs import CompletionOutput, RequestOutput

T = TypeVar("T")

MOST = 64
"""Results that wait side by side; then they become one."""


class Mailbox(Generic[T]):
    """A queue with one reader, of results and errors. All methods are for the event loop's thread.

    Deltas that nobody has read are joined once there are `MOST` of them, so that what a slow reader holds
    is its text, and not an object per token. Results that tell all so far replace one another.
    """

    __slots__ = ("_items", "_merges", "_waiter")

    def __init__(self, merges: bool = False):
        """`merges`: results are `RequestOutput`s of the kind DELTA."""
        self._items: collections.deque[T] = collections.deque()
        self._merges = merges
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Hand an item over."""
        items = self._items
        items.append(item)
        if len(items) > MOST:
            self._shrink()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> T:
        """The next item."""
        items = self._items
        while not items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return items.popleft()

    def _shrink(self) -> None:
        items = self._items
        last = items.pop()
        outputs = [item for item in items if isinstance(item, RequestOutput)]
        if len(outputs) == len(items):
            items.clear()
            items.append(merged(outputs) if self._merges else outputs[-1])  # type: ignore[arg-type]
        items.append(last)


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Successive deltas of one request as one."""
    choices: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for choice in output.outputs:
            choices.setdefault(choice.index, []).append(choice)
    last = outputs[-1]
    return RequestOutput(
        request_id=last.request_id,
        prompt=last.prompt,
        prompt_token_ids=last.prompt_token_ids,
        outputs=[_joined(parts) for parts in choices.values()],
        finished=last.finished,
        prompt_logprobs=last.prompt_logprobs,
        num_cached_tokens=last.num_cached_tokens,
        metrics=last.metrics,
        synthetic_acceptance=last.synthetic_acceptance,
    )


def _joined(parts: list[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    logprobs = None
    if last.logprobs is not None:
        logprobs = [position for part in parts for position in part.logprobs or []]
    return CompletionOutput(
        index=last.index,
        text="".join([part.text for part in parts]),
        token_ids=[token for part in parts for token in part.token_ids],
        cumulative_logprob=last.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
