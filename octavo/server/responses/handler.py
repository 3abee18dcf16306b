"""POST /v1/responses; GET and DELETE of stored ones."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Send

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput
from octavo.sampling_params import RequestOutputKind
from octavo.server.answer import AnswerDelta
from octavo.server.chat import ChatJob, prepare_chat
from octavo.server.errors import ApiError, as_api_error, bad_request
from octavo.server.protocol.requests import ChatMessage
from octavo.server.responses.conversation import LOGPROBS, answer_message, as_chat, new_messages, renamed
from octavo.server.responses.events import ResponseEvent
from octavo.server.responses.protocol import (
    ReasoningConfig,
    ReasoningItem,
    ResponseDeleted,
    ResponseObject,
    ResponseRequest,
    TextConfig,
    TextFormat,
)
from octavo.server.responses.writer import ResponseWriter
from octavo.server.service import Service
from octavo.server.streaming import AsgiResponse, EventStream, named_event
from octavo.server.usage import UsageCount

_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # of the latter there is none


async def create_response(service: Service, body: ResponseRequest) -> AsgiResponse:
    """Answer a request of the Responses API.

    Raises:
        ApiError, RequestError: the request cannot be served.
    """
    model = service.check_model(body.model)
    _check(service, body)
    messages = _history(service, body) + new_messages(body)
    # Whoever knows it can read the conversation, so it cannot be guessed.
    name = f"resp_{secrets.token_hex(24)}"
    try:
        chat = await prepare_chat(service, as_chat(body, messages), model, name)
    except (ApiError, RequestError) as error:
        raise renamed(as_api_error(error)) from None
    if chat.plan.reads and chat.body.logprobs:
        raise _unsupported(
            "include", f"include of {LOGPROBS} beside tools or a reasoning parser", "leave out one of them"
        )
    if chat.plan.reasoning is not None or chat.body.logprobs:
        # Step by step, so that tokens of reasoning can be counted, and many log-probabilities hold nobody up.
        chat.params = chat.params.clone(output_kind=RequestOutputKind.DELTA)
    job = _ResponseJob(service, body, chat, messages)
    if body.stream:
        return _ResponseStream(job)
    return Response(await job.complete(), media_type="application/json")


async def read_response(service: Service, response_id: str) -> AsgiResponse:
    """Answer with a stored response.

    Raises:
        ApiError: 404.
    """
    entry = service.responses.get(response_id)
    if entry is None:
        raise _no_response(response_id)
    return Response(entry.body, media_type="application/json")


async def delete_response(service: Service, response_id: str) -> AsgiResponse:
    """Forget a stored response.

    Raises:
        ApiError: 404.
    """
    if not service.responses.delete(response_id):
        raise _no_response(response_id)
    return Response(msgspec.json.encode(ResponseDeleted(response_id)), media_type="application/json")


def _no_response(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {response_id[:128]!r}: it was not stored, or gave way to later ones "
        "(--response-store-bytes)",
        param="response_id",
        code="response_not_found",
    )


def _history(service: Service, body: ResponseRequest) -> list[ChatMessage]:
    """The conversation that a request goes on with."""
    if body.previous_response_id is None:
        return []
    entry = service.responses.get(body.previous_response_id)
    if entry is None:
        error = _no_response(body.previous_response_id)
        raise ApiError(
            400, str(error), param="previous_response_id", code="previous_response_not_found"
        ) from None
    return entry.messages


def _check(service: Service, body: ResponseRequest) -> None:
    """Refuse by name what this version, or this server, does not do.

    Raises:
        ApiError: 400 naming the field.
    """
    if body.background:
        raise _unsupported("background", "background=true", "ask for a stream, or keep the connection")
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise _unsupported(name, name, "use previous_response_id, or send the items in input")
    if body.truncation == "auto":
        raise _unsupported("truncation", "truncation=auto", "leave it out, or set truncate_prompt_tokens")
    for item in body.include or ():
        if item not in _INCLUDABLE:
            raise _unsupported("include", f"include of {item[:64]!r}", f"give {LOGPROBS} or leave it out")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise bad_request(f"top_logprobs needs include=[{LOGPROBS!r}]", "top_logprobs")
    if body.store and not service.responses.limit:
        raise bad_request(
            "store=true, but this server stores no responses: leave it out, or start the server with "
            "--response-store-bytes above 0",
            "store",
        )


def _unsupported(param: str, what: str, remedy: str) -> ApiError:
    return ApiError(
        400, f"{what} is not supported by this version: {remedy}", param=param, code="unsupported_parameter"
    )


class _ResponseJob:
    """One request, told whole or in events; its chat job knows prompt and settings."""

    def __init__(self, service: Service, body: ResponseRequest, chat: ChatJob, messages: list[ChatMessage]):
        self._service = service
        self._chat = chat
        self._messages = messages
        self._parser = chat.parser()
        self._reasoning_tokens = 0
        self.told: list[bytes] = []  # events that have not been sent
        self.writer = ResponseWriter(_begun(service, body, chat), self._tell if body.stream else _ignore)

    async def complete(self) -> bytes:
        """The whole answer."""
        async for _ in self._run():
            pass
        return msgspec.json.encode(self.writer.response)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events: one item per engine step."""
        async with aclosing(self._run()) as steps:
            async for _ in steps:
                if self.told:
                    yield self.take()

    def take(self) -> bytes:
        """Events to send."""
        data, self.told = b"".join(self.told), []
        return data

    async def _run(self) -> AsyncGenerator[None, None]:
        """Grow the response to its end; yields after each step."""
        usage, begun = UsageCount(), False
        async with aclosing(self._chat.results()) as results:
            try:
                async for batch in results:
                    for index, out in batch:
                        usage.prompt(index, out)
                        if not begun:
                            begun = True
                            self.writer.begin()
                        for output in out.outputs:
                            usage.add(len(output.token_ids))
                            self._take_in(output)
                            if output.finish_reason:
                                self._end(output, usage)
                    yield
            except RequestError as error:
                raise renamed(as_api_error(error)) from None

    def _take_in(self, output: CompletionOutput) -> None:
        if self._parser is None:
            told = self._chat.logprobs(output)
            new, logprobs = AnswerDelta(output.text), [] if told is None else told.content
        else:
            new, logprobs = self._parser.feed(output.text, last=bool(output.finish_reason)), []
        writer = self.writer
        if new.reasoning:
            writer.reasoning(new.reasoning)
        if new.content or logprobs:
            writer.text(new.content, logprobs)
        for call in new.calls:
            writer.call(call.index, call.id, call.name, call.arguments)
        if all(isinstance(item, ReasoningItem) for item in writer.response.output):
            self._reasoning_tokens += len(output.token_ids)

    def _end(self, output: CompletionOutput, usage: UsageCount) -> None:
        items = self.writer.response.output
        thought = any(isinstance(item, ReasoningItem) for item in items)
        tokens = self._reasoning_tokens if thought else 0
        self.writer.end(output.finish_reason, usage.total(), tokens)
        self._store()
        self.writer.tell_end()

    def _store(self) -> None:
        response = self.writer.response
        if not response.store:
            return
        body = msgspec.json.encode(response)
        messages = [*self._messages, answer_message(response.output)]
        response.store = self._service.responses.put(response.id, body, messages)

    def _tell(self, event: ResponseEvent) -> None:
        self.told.append(named_event(event))


class _ResponseStream(EventStream):
    """Events of a response; an error is one of them."""

    def __init__(self, job: _ResponseJob):
        super().__init__(job.stream())
        self._job = job

    async def fail(self, error: ApiError, send: Send) -> None:
        self._job.writer.fail(str(error))
        await send({"type": "http.response.body", "body": self._job.take(), "more_body": False})


def _ignore(event: ResponseEvent) -> None:
    pass


def _begun(service: Service, body: ResponseRequest, chat: ChatJob) -> ResponseObject:
    """The response before any output."""
    text = body.text or TextConfig()
    stores = bool(service.responses.limit)
    return ResponseObject(
        id=chat.id,
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=chat.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or ReasoningConfig(),
        store=stores if body.store is None else body.store,
        temperature=chat.params.temperature,
        text=TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=chat.params.top_p,
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        max_tool_calls=body.max_tool_calls,
        synthetic_acceptance=chat.service.synthetic,
    )
