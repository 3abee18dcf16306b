"""POST /v1/chat/completions."""

from __future__ import annotations

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
from octavo.server.errors import ApiError, bad_request
from octavo.server.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs
from octavo.server.params import check_request, new_request_id, sampling_params, truncated
from octavo.server.parsing import check_depth
from octavo.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Delta,
    TemplateFields,
)
from octavo.server.service import Service
from octavo.server.streaming import DONE, AsgiResponse, EventStream, event
from octavo.server.text import ChatPrompt
from octavo.server.usage import UsageCount, stop_cause

_ROLE = Delta(role="assistant", content="")
MAX_MESSAGES = 16384
_RESERVED = frozenset(
    "messages tools template special_tokens chat_template add_generation_prompt "
    "continue_final_message".split()
)


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
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    top = body.top_logprobs or 0
    if top < 0:
        raise bad_request(f"top_logprobs={top} is not valid: give an integer of at least 0", "top_logprobs")
    params = sampling_params(
        body,
        service.engine.default_params(),
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=top if body.logprobs else None,
    )
    given = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    extra = {name: value for name, value in given.items() if value is not None}
    prompt = await service.text.encode_chat(chat_prompt(service, body.messages, body, extra))
    prompt = truncated(prompt, body, params, service.engine.max_model_len)
    style = LogprobStyle(service.text, top, bool(body.return_tokens_as_token_ids), params.skip_special_tokens)
    return ChatJob(service, body, params, prompt, style, name, model, _echo(body))


def _echo(body: ChatRequest) -> str:
    """The text of the assistant's last message, where the answer is to begin with it."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "".join(p.text or "" for p in last.content)


def chat_prompt(
    service: Service,
    messages: list[ChatMessage],
    options: TemplateFields,
    extra: dict[str, Any] | None = None,
) -> ChatPrompt:
    """A conversation as the chat template takes it.

    Raises:
        ApiError: 400 for what the template may not get, naming the field.
    """
    if not messages:
        raise bad_request("messages is empty: give at least one", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(
            f"messages has {len(messages)} entries: at most {MAX_MESSAGES} are allowed", "messages"
        )
    if options.chat_template is not None and not service.config.trust_request_chat_template:
        raise bad_request(
            "chat_template is not taken from requests: start the server with --trust-request-chat-template",
            "chat_template",
        )
    continued = bool(options.continue_final_message)
    generation = not continued if options.add_generation_prompt is None else options.add_generation_prompt
    kwargs = dict(options.chat_template_kwargs or {})
    check_depth(kwargs, "chat_template_kwargs")
    for name in kwargs:
        if name in _RESERVED:
            raise bad_request(
                f"chat_template_kwargs holds {name}: give it as a field of the request",
                "chat_template_kwargs",
            )
    return ChatPrompt(
        messages=[_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        add_generation_prompt=generation,
        continue_final_message=continued,
        add_special_tokens=bool(options.add_special_tokens),  # templates write their own
        chat_template=options.chat_template,
        template_kwargs=(extra or {}) | kwargs,
    )


def _plain_message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.tool_calls or message.tool_call_id is not None or message.role in ("tool", "function"):
        raise ApiError(
            400,
            f"{where} belongs to a tool call: tools are not supported by this version",
            param=where,
            code="unsupported_parameter",
        )
    content: Any = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            place = f"{where}.content[{i}]"
            if part.type != "text":
                raise ApiError(
                    400,
                    f"{place}.type is {part.type[:64]!r}: this version takes text alone",
                    param=f"{place}.type",
                    code="unsupported_parameter",
                )
            if part.text is None:
                raise bad_request(f"{place}.text is missing", f"{place}.text")
        content = msgspec.to_builtins(content)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


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
    lead: str = ""  # text that an echo begins with
    created: int = field(default_factory=lambda: int(time.time()))

    async def complete(self) -> ChatCompletion:
        """The whole answer."""
        usage = UsageCount()
        choices: list[ChatChoice] = []
        answer = ChatCompletion(self.id, self.created, self.model, choices, usage.total())
        async with aclosing(self.results()) as results:
            async for batch in results:
                for index, out in batch:
                    usage.prompt(index, out)
                    for output in out.outputs:
                        usage.add(len(output.token_ids))
                        choices.append(self._choice(output))
                    if self.body.prompt_logprobs is not None and out.prompt_logprobs is not None:
                        answer.prompt_logprobs = prompt_logprobs(out.prompt_logprobs, self.style)
        choices.sort(key=lambda choice: choice.index)
        answer.usage = usage.total()
        if self.body.return_token_ids:
            answer.prompt_token_ids = self.prompt
        return answer

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer in pieces: one item per engine step. Each choice's first chunk tells the role."""
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = with_usage and options is not None and bool(options.continuous_usage_stats)
        usage = UsageCount()
        first = True
        async with aclosing(self.results()) as results:
            async for batch in results:
                events = []
                for index, out in batch:
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
                        choice = self._chunk_choice(output)
                        if (
                            output.text
                            or output.finish_reason
                            or choice.logprobs
                            or choice.token_ids
                            or continuous
                        ):
                            if continuous:
                                interim = usage.total()
                            events.append(
                                event(ChatChunk(self.id, self.created, self.model, [choice], interim))
                            )
                if events:
                    yield b"".join(events)
        if with_usage:
            yield event(ChatChunk(self.id, self.created, self.model, [], usage.total())) + DONE
        else:
            yield DONE

    def results(self) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Run the request: what is new after each step."""
        return self.service.results(
            [self.prompt],
            self.params,
            self.id,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt,
        )

    def _first_event(self, index: int, delta: Delta, usage: Any) -> bytes:
        """What comes before any token: the role, then what is echoed."""
        chunk = ChatChunk(
            self.id, self.created, self.model, [ChatChunkChoice(index, delta, None, None)], usage
        )
        if self.body.return_token_ids and index == 0 and delta is _ROLE:
            chunk.prompt_token_ids = self.prompt
        return event(chunk)

    def _chunk_choice(self, output: CompletionOutput) -> ChatChunkChoice:
        delta = Delta(content=output.text) if output.text or not output.finish_reason else Delta()
        choice = ChatChunkChoice(output.index, delta, self.logprobs(output), output.finish_reason)  # type: ignore[arg-type]
        if output.finish_reason:
            choice.stop_reason = stop_cause(output)
        choice.token_ids = self._token_ids(output)
        return choice

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=AssistantMessage(self.lead + output.text),
            logprobs=self.logprobs(output),
            finish_reason=output.finish_reason,  # type: ignore[arg-type]  # others never get here
            stop_reason=stop_cause(output),
            token_ids=self._token_ids(output),
        )

    def _token_ids(self, output: CompletionOutput) -> list[int] | UnsetType:
        return list(output.token_ids) if self.body.return_token_ids else UNSET

    def logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        """Log-probabilities of a result's tokens, if they are asked for."""
        if not self.body.logprobs or not output.token_ids:
            return None
        return chat_logprobs(output.token_ids, output.logprobs or [], self.style)
