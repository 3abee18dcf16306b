"""The events of a streamed response, in OpenAI's names, and the writer that grows a response by them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from msgspec import Struct

from octavo.server.protocol import TokenLogprob, Usage
from octavo.server.responses.protocol import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)


class _Event(Struct, kw_only=True, tag_field="type"):
    sequence_number: int


class ResponseCreated(_Event, tag="response.created"):
    """The first event: the response before any output."""

    response: ResponseObject


class ResponseInProgress(_Event, tag="response.in_progress"):
    """The model is at work."""

    response: ResponseObject


class OutputItemAdded(_Event, tag="response.output_item.added"):
    """An item begins, empty."""

    output_index: int
    item: OutputMessage


class ContentPartAdded(_Event, tag="response.content_part.added"):
    """A part of a message begins, empty."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class OutputTextDelta(_Event, tag="response.output_text.delta"):
    """More text of a part."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_Event, tag="response.output_text.done"):
    """The whole text of a part."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ContentPartDone(_Event, tag="response.content_part.done"):
    """A part is complete."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class OutputItemDone(_Event, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputMessage


class ResponseCompleted(_Event, tag="response.completed"):
    """The last event: the whole response."""

    response: ResponseObject


class ResponseIncomplete(_Event, tag="response.incomplete"):
    """The last event of a response that reached its limit of tokens."""

    response: ResponseObject


class ResponseFailed(_Event, tag="response.failed"):
    """The last event of a response that could not be finished."""

    response: ResponseObject


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)


class ResponseWriter:
    """Grows one response and tells each step as an event, so that streamed and whole answers are one.

    Args:
        response: as it is before any output; changed in place.
        emit: takes each event at once: what it refers to changes afterwards.
    """

    def __init__(self, response: ResponseObject, emit: Callable[[ResponseEvent], None]):
        self.response = response
        self._emit = emit
        self._count = 0
        self._message: OutputMessage | None = None

    def begin(self) -> None:
        """The request has been taken in."""
        self._emit(ResponseCreated(sequence_number=self._number(), response=self.response))
        self._emit(ResponseInProgress(sequence_number=self._number(), response=self.response))

    def text(self, delta: str, logprobs: list[TokenLogprob]) -> None:
        """More text of the message, which begins with its first."""
        message = self._open_message()
        part = message.content[0]
        part.text += delta
        part.logprobs += logprobs
        self._emit(
            OutputTextDelta(
                sequence_number=self._number(),
                item_id=message.id,
                output_index=self._index,
                content_index=0,
                delta=delta,
                logprobs=logprobs,
            )
        )

    def end(self, finish_reason: str | None, usage: Usage) -> None:
        """The model has ended."""
        cut = finish_reason == "length"
        self._open_message()
        self._close_message("incomplete" if cut else "completed")
        response = self.response
        response.completed_at = int(time.time())
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(),
            usage.total_tokens,
        )
        if cut:
            response.status, response.incomplete_details = "incomplete", IncompleteDetails()
        else:
            response.status = "completed"

    def tell_end(self) -> None:
        """The last event."""
        kind = ResponseCompleted if self.response.status == "completed" else ResponseIncomplete
        self._emit(kind(sequence_number=self._number(), response=self.response))

    def fail(self, message: str) -> None:
        """The response cannot be finished."""
        self.response.status, self.response.error = "failed", ResponseFailure(message)
        self._emit(ResponseFailed(sequence_number=self._number(), response=self.response))

    def _number(self) -> int:
        self._count += 1
        return self._count - 1

    @property
    def _index(self) -> int:
        """The place of the item that grows."""
        return len(self.response.output) - 1

    def _open_message(self) -> OutputMessage:
        if self._message is None:
            self._message = message = OutputMessage(id=f"msg_{secrets.token_hex(24)}")
            self.response.output.append(message)
            self._emit(
                OutputItemAdded(sequence_number=self._number(), output_index=self._index, item=message)
            )
            message.content.append(OutputText())
            self._emit(
                ContentPartAdded(
                    sequence_number=self._number(),
                    item_id=message.id,
                    output_index=self._index,
                    content_index=0,
                    part=message.content[0],
                )
            )
        return self._message

    def _close_message(self, status: ItemStatus) -> None:
        message = self._message
        if message is None:
            return
        self._message, part = None, message.content[0]
        place = {"item_id": message.id, "output_index": self._index, "content_index": 0}
        self._emit(
            OutputTextDone(sequence_number=self._number(), text=part.text, logprobs=part.logprobs, **place)  # type: ignore[arg-type]
        )
        self._emit(ContentPartDone(sequence_number=self._number(), part=part, **place))  # type: ignore[arg-type]
        message.status = status
        self._emit(OutputItemDone(sequence_number=self._number(), output_index=self._index, item=message))
