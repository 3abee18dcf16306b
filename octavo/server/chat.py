"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.answer import AnswerDelta, AnswerParser, AnswerPlan, plan_answer
from octavo.server.conversation import chat_prompt
from octavo.server.errors import bad_request
from octavo.server.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs
from octavo.server.params import (
    check_request,
    form_field,
    new_request_id,
    output_form,
    sampling_params,
)
from octavo.server.protocol.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FinishReason,
    Usage,
)
from octavo.server.protocol.requests import ChatMessage, ChatRequest
from octavo.server.reasoning import Thinking
from octavo.server.service import Service
from octavo.server.streaming import DONE, AsgiResponse, EventStream, TextEvents, event, is_text
from octavo.server.tools.choice import ToolMode, tool_request
from octavo.server.tools.protocol import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from octavo.server.usage import UsageCount, stop_cause, stream_usage

_ROLE = Delta(role="assistant", content="")


async def create_chat_completion(service: Service, body: ChatRequest, request_id: str | None) -> AsgiResponse:
    """Answer a chat request.

    Raises:
        ApiError, RequestError: the request cannot be served.
    """
    model = service.check_model(body.model)
    check_request(body)
    name = f"chatcmpl-{body.request_id or request_id or new_request_id()}"
    job = await prepare_chat(service, body, model, name)
    if body.stream:
        return EventStream(job.stream())
    return Response(msgspec.json.encode(await job.complete()), media_type="application/json")


async def prepare_chat(service: Service, body: ChatRequest, model: str, name: str) -> ChatJob:
    """Check a request and make its prompt; nothing runs yet.

    Raises:
        ApiError, RequestError: the request cannot be served.
    """
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    top = body.top_logprobs or 0
    if top < 0:
        raise bad_request(f"top_logprobs={top} is not valid: give an integer of at least 0", "top_logprobs")
    tools = tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    plan = plan_answer(service.config, tools, output_form(body), service.text.special_id)
    params = sampling_params(
        body,
        service.engine,
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=top if body.logprobs else None,
    )
    given = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    extra = {name: value for name, value in given.items() if value is not None}
    hidden = plan.tools.mode == ToolMode.NONE and service.config.exclude_tools_when_tool_choice_none
    offered = [] if hidden else plan.tools.for_template()
    prompt = await service.text.encode_chat(chat_prompt(service, body.messages, body, extra, offered))
    prompt = params.truncated(prompt, service.engine.max_model_len)
    thinking = _thinking(service, body, prompt, plan)
    if (form := plan.form_after(thinking)) is not params.structured_outputs:
        params = params.clone(structured_outputs=form)
    if any(service.text.special_id(mark) is not None for mark in plan.markers):
        params = params.clone(skip_special_tokens=False)
    style = LogprobStyle(service.text, top, service.names_tokens_by_id(body), params.skip_special_tokens)
    return ChatJob(service, body, params, prompt, style, name, model, plan, thinking, _echo(body))


def _thinking(service: Service, body: ChatRequest, prompt: list[int], plan: AnswerPlan) -> Thinking | None:
    """Whether the answer begins with reasoning, by its prompt."""
    if plan.reasoning is None:
        return None
    if body.continue_final_message:
        return plan.reasoning.continued(_text(body.messages[-1]))
    return plan.reasoning.thinking(service.text.ending(prompt))


def _echo(body: ChatRequest) -> str:
    """The text of the assistant's last message, where the answer is to begin with it."""
    last = body.messages[-1]
    return _text(last) if body.echo and last.role == "assistant" else ""


def _text(message: ChatMessage) -> str:
    """A message's text."""
    content = message.content
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or [])


@dataclass
class ChatJob:
    """One chat request, told whole or in pieces."""

    service: Service
    body: ChatRequest
    params: SamplingParams
    prompt: list[int]
    style: LogprobStyle
    id: str
    model: str
    plan: AnswerPlan
    thinking: Thinking | None = None
    lead: str = ""  # text that an echo begins with
    created: int = field(default_factory=lambda: int(time.time()))

    async def complete(self) -> ChatCompletion:
        """The whole answer."""
        usage = UsageCount()
        answer = ChatCompletion(
            self.id,
            self.created,
            self.model,
            [],
            usage.total(),
            synthetic_acceptance=self.service.synthetic,
        )
        async with aclosing(self.results()) as results:
            async for batch in results:
                for index, out in batch:
                    usage.prompt(index, out)
                    for output in out.outputs:
                        usage.add(len(output.token_ids))
                    fill = functools.partial(self._fill, answer, out)
                    if self.body.logprobs or self.body.prompt_logprobs is not None:
                        # They may be millions, which would hold up everybody's streams.
                        await asyncio.to_thread(fill)
                    else:
                        fill()
        answer.choices.sort(key=lambda choice: choice.index)
        answer.usage = usage.total()
        if self.body.return_token_ids:
            answer.prompt_token_ids = self.prompt
        return answer

    def _fill(self, answer: ChatCompletion, out: RequestOutput) -> None:
        """Put a result into the answer."""
        answer.choices += [self._choice(output) for output in out.outputs]
        if self.body.prompt_logprobs is not None and out.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(out.prompt_logprobs, self.style)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer in pieces: one item per engine step. Each choice's first chunk tells the role."""
        forced = self.service.config.enable_force_include_usage
        with_usage, continuous = stream_usage(self.body.stream_options, forced)
        usage = UsageCount()
        first = True
        parsers = [self.parser() for _ in range(self.params.n)]
        texts = None if continuous else self._text_events(UNSET if not with_usage else None)
        async with aclosing(self.results()) as results:
            async for batch in results:
                events = []
                for index, out in batch:
                    if texts is not None and not first and is_text(out):
                        (output,) = out.outputs
                        usage.add(len(output.token_ids))
                        if output.text:
                            events.append(texts[output.index].event(output.text))
                        continue
                    usage.prompt(index, out)
                    interim = (usage.total() if continuous else None) if with_usage else UNSET
                    if first:
                        first = False
                        for i in range(self.params.n):
                            events.append(self._first_event(i, _ROLE, interim))
                            if self.lead:
                                events.append(self._first_event(i, Delta(content=self.lead), interim))
                    for output in out.outputs:
                        usage.add(len(output.token_ids))
                        parser = parsers[output.index]
                        new = self._read(parser, output)
                        choice = self._chunk_choice(output, parser, new)
                        if new or output.finish_reason or choice.logprobs or choice.token_ids or continuous:
                            if continuous:
                                interim = usage.total()
                            events.append(event(self._chunk([choice], interim)))
                if events:
                    yield events[0] if len(events) == 1 else b"".join(events)
        if with_usage:
            yield event(self._chunk([], usage.total())) + DONE
        else:
            yield DONE

    def _text_events(self, usage: Usage | None | UnsetType) -> list[TextEvents] | None:
        """Chunks of each choice that bring text and nothing else; None where all bring more."""
        if self.parser() is not None or self.body.logprobs or self.body.return_token_ids:
            return None

        def chunk(index: int, text: str) -> ChatChunk:
            choice = ChatChunkChoice(index, Delta(content=text), None, None)
            return self._chunk([choice], usage)

        return [TextEvents(functools.partial(chunk, index)) for index in range(self.params.n)]

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None | UnsetType) -> ChatChunk:
        marked = self.service.synthetic
        return ChatChunk(self.id, self.created, self.model, choices, usage, synthetic_acceptance=marked)

    def results(self) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Run the request: what is new after each step."""
        return self.service.results(
            [self.prompt],
            self.params,
            self.id,
            exact=self.body.request_id is not None,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt,
            names={
                "prompt": "messages",
                "logprobs": "top_logprobs",
                "structured_outputs": self._asked_form(),
            },
        )

    def _asked_form(self) -> str:
        """Which fields the form of the answer came from."""
        own = form_field(self.body)
        if not self.plan.calls_in_form:
            return own
        return f"tools and {own}" if self.plan.content_in_form else "tools"

    def _first_event(self, index: int, delta: Delta, usage: Any) -> bytes:
        """What comes before any token: the role, then what is echoed."""
        chunk = self._chunk([ChatChunkChoice(index, delta, None, None)], usage)
        if self.body.return_token_ids and index == 0 and delta is _ROLE:
            chunk.prompt_token_ids = self.prompt
        return event(chunk)

    def parser(self) -> AnswerParser | None:
        """A parser of one choice; None where its text is shown as it is."""
        return self.plan.parser(self.thinking)

    def _chunk_choice(
        self, output: CompletionOutput, parser: AnswerParser | None, new: AnswerDelta
    ) -> ChatChunkChoice:
        choice = ChatChunkChoice(
            output.index,
            _delta(new, bool(output.finish_reason)),
            self.logprobs(output),
            _finish_reason(output, parser),
        )
        if output.finish_reason:
            choice.stop_reason = stop_cause(output)
        choice.token_ids = self._token_ids(output)
        return choice

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        parser = self.parser()
        new = self._read(parser, output)
        new.content = self.lead + new.content
        message = _message(new, self.plan)
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self.logprobs(output),
            finish_reason=_finish_reason(output, parser),
            stop_reason=stop_cause(output),
            token_ids=self._token_ids(output),
        )

    def _read(self, parser: AnswerParser | None, output: CompletionOutput) -> AnswerDelta:
        """What a result adds to its choice."""
        if parser is None:
            return AnswerDelta(output.text)
        new = parser.feed(output.text, last=bool(output.finish_reason))
        if self.body.include_reasoning is False:
            new.reasoning = ""
        return new

    def _token_ids(self, output: CompletionOutput) -> list[int] | UnsetType:
        return list(output.token_ids) if self.body.return_token_ids else UNSET

    def logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        """Log-probabilities of a result's tokens, if they are asked for."""
        if not self.body.logprobs or not output.token_ids:
            return None
        return chat_logprobs(output.token_ids, output.logprobs or [], self.style)


def _finish_reason(output: CompletionOutput, parser: AnswerParser | None) -> FinishReason | None:
    if output.finish_reason == "stop" and parser is not None and parser.ends_in_calls:
        return "tool_calls"
    return output.finish_reason  # type: ignore[return-value]  # others never get here


def _delta(new: AnswerDelta, last: bool) -> Delta:
    delta = Delta()
    if new.content or not (last or new):
        delta.content = new.content
    if new.reasoning:
        delta.reasoning_content = delta.reasoning = new.reasoning
    if new.calls:
        delta.tool_calls = [
            ToolCallDelta(call.index, FunctionCallDelta(arguments=call.arguments))
            if call.name is None
            else ToolCallDelta(
                call.index, FunctionCallDelta(call.name, call.arguments), call.id or UNSET, "function"
            )
            for call in new.calls
        ]
    return delta


def _message(whole: AnswerDelta, plan: AnswerPlan) -> AssistantMessage:
    calls: list[ToolCall] = []
    for call in whole.calls:
        if call.name is not None:
            calls.append(ToolCall(call.id or "", FunctionCall(call.name, call.arguments)))
        else:
            calls[-1].function.arguments += call.arguments
    message = AssistantMessage(whole.content)
    if not whole.content and (calls or whole.reasoning):
        message.content = None
    if calls:
        message.tool_calls = calls
    if plan.reasoning is not None:
        message.reasoning_content = message.reasoning = whole.reasoning or None
    return message
