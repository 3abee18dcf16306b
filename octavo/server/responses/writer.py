"""Grows a response item by item, and tells each step as an event."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from octavo.server.protocol.answers import TokenLogprob, Usage
from octavo.server.responses import events
from octavo.server.responses.protocol import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)


class ResponseWriter:
    """Grows one response and tells each step as an event, so that streamed and whole answers are one.

    Items come one after the other: whatever belongs to another item ends the one that grows.

    Args:
        response: as it is before any output; changed in place.
        emit: takes each event at once: what it refers to changes afterwards.
    """

    def __init__(self, response: ResponseObject, emit: Callable[[events.ResponseEvent], None]):
        self.response = response
        self._emit = emit
        self._count = 0
        self._growing: OutputItem | None = None
        self._call = -1  # the index of the call that grows

    def begin(self) -> None:
        """The request has been taken in."""
        self._tell(events.ResponseCreated, response=self.response)
        self._tell(events.ResponseInProgress, response=self.response)

    def reasoning(self, delta: str) -> None:
        """More of what the model thinks."""
        item = self._growing
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(id=_new_id("rs"))
            self._open(item)
            self._add_part(item, ReasoningText())
        item.content[0].text += delta
        self._tell(events.ReasoningTextDelta, **self._place(item), delta=delta)

    def text(self, delta: str, logprobs: list[TokenLogprob]) -> None:
        """More text of a message."""
        item = self._open_message()
        part = item.content[0]
        part.text += delta
        part.logprobs += logprobs
        self._tell(events.OutputTextDelta, **self._place(item), delta=delta, logprobs=logprobs)

    def call(self, index: int, call_id: str | None, name: str | None, arguments: str) -> None:
        """More of a call; `call_id` and `name` come with its first part."""
        item = self._growing
        if not isinstance(item, FunctionCallItem) or index != self._call:
            item = FunctionCallItem(id=_new_id("fc"), call_id=call_id or _new_id("call"), name=name or "")
            self._open(item)
            self._call = index
        if arguments:
            item.arguments += arguments
            self._tell(events.CallArgumentsDelta, item_id=item.id, output_index=self._index, delta=arguments)

    def end(self, finish_reason: str | None, usage: Usage, reasoning_tokens: int) -> None:
        """The model has ended."""
        cut = finish_reason == "length"
        if not self.response.output:
            self._open_message()
        self._close("incomplete" if cut else "completed")
        response = self.response
        response.completed_at = int(time.time())
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(reasoning_tokens),
            usage.total_tokens,
        )
        if cut:
            response.status, response.incomplete_details = "incomplete", IncompleteDetails()
        else:
            response.status = "completed"

    def tell_end(self) -> None:
        """The last event."""
        done = self.response.status == "completed"
        self._tell(events.ResponseCompleted if done else events.ResponseIncomplete, response=self.response)

    def fail(self, message: str) -> None:
        """The response cannot be finished."""
        if self._growing is not None:
            self._growing.status = "incomplete"
        self.response.status, self.response.error = "failed", ResponseFailure(message)
        self._tell(events.ResponseFailed, response=self.response)

    def _tell(self, kind: type[Any], **fields: Any) -> None:
        self._emit(kind(sequence_number=self._count, **fields))
        self._count += 1

    @property
    def _index(self) -> int:
        """The place of the item that grows."""
        return len(self.response.output) - 1

    def _place(self, item: ReasoningItem | OutputMessage) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": self._index, "content_index": 0}

    def _open_message(self) -> OutputMessage:
        item = self._growing
        if not isinstance(item, OutputMessage):
            item = OutputMessage(id=_new_id("msg"))
            self._open(item)
            self._add_part(item, OutputText())
        return item

    def _open(self, item: OutputItem) -> None:
        self._close("completed")
        self._growing = item
        self.response.output.append(item)
        self._tell(events.OutputItemAdded, output_index=self._index, item=item)

    def _add_part(self, item: ReasoningItem | OutputMessage, part: Any) -> None:
        item.content.append(part)
        self._tell(events.ContentPartAdded, **self._place(item), part=part)

    def _close(self, status: ItemStatus) -> None:
        item, self._growing = self._growing, None
        if item is None:
            return
        if isinstance(item, FunctionCallItem):
            self._tell(
                events.CallArgumentsDone,
                item_id=item.id,
                output_index=self._index,
                name=item.name,
                arguments=item.arguments,
            )
        else:
            part, place = item.content[0], self._place(item)
            if isinstance(part, OutputText):
                self._tell(events.OutputTextDone, **place, text=part.text, logprobs=part.logprobs)
            else:
                self._tell(events.ReasoningTextDone, **place, text=part.text)
            self._tell(events.ContentPartDone, **place, part=part)
        item.status = status
        self._tell(events.OutputItemDone, output_index=self._index, item=item)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"
