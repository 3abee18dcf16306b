"""The events of a streamed response, in OpenAI's names."""

from __future__ import annotations

from msgspec import Struct

from octavo.server.protocol.answers import TokenLogprob
from octavo.server.responses.protocol import OutputItem, OutputText, ReasoningText, ResponseObject


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
    item: OutputItem


class ContentPartAdded(_Event, tag="response.content_part.added"):
    """A part of a message begins, empty."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


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


class ReasoningTextDelta(_Event, tag="response.reasoning_text.delta"):
    """More of what the model thinks."""

    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(_Event, tag="response.reasoning_text.done"):
    """All that the model thought."""

    item_id: str
    output_index: int
    content_index: int
    text: str


class CallArgumentsDelta(_Event, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class CallArgumentsDone(_Event, tag="response.function_call_arguments.done"):
    """A call's whole arguments."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class ContentPartDone(_Event, tag="response.content_part.done"):
    """A part is complete."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class OutputItemDone(_Event, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


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
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
    | ContentPartDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
