"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.errors import bad_request
from octavo.server.logprobs import LogprobStyle, completion_logprobs, prompt_logprobs
from octavo.server.params import check_request, form_field, named_by, new_request_id, sampling_params
from octavo.server.protocol.answers import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    Usage,
)
from octavo.server.protocol.requests import CompletionRequest
from octavo.server.service import Service
from octavo.server.streaming import DONE, AsgiResponse, EventStream, TextEvents, event, is_text
from octavo.server.usage import UsageCount, stop_cause, stream_usage

MAX_CHOICES = 8192
"""Choices of all prompts of a request together."""


async def create_completion(
    service: Service, body: CompletionRequest, request_id: str | None
) -> AsgiResponse:
    """Answer a completion request.

    Raises:
        ApiError, RequestError: the request cannot be served.
    """
    model = service.check_model(body.model)
    check_request(body)
    job = await _prepare(service, body, model, body.request_id or request_id or new_request_id())
    if body.stream:
        return EventStream(job.stream())
    return Response(msgspec.json.encode(await job.complete()), media_type="application/json")


async def _prepare(service: Service, body: CompletionRequest, model: str, request_id: str) -> _CompletionJob:
    echo_only = bool(body.echo) and body.max_tokens == 0
    params = sampling_params(
        body,
        service.engine,
        # An echo alone needs the prompt's pass through the model, which yields one token: dropped later.
        1 if echo_only else body.max_tokens,
        logprobs=body.logprobs,
        detokenize=service.text.has_tokenizer,
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = params.clone(prompt_logprobs=body.logprobs)
    params = _best_of(body, params)
    texts, prompts = await _prompts(service, body)
    most = max(MAX_CHOICES, service.config.max_prompts_per_request)
    if len(prompts) * params.n > most:
        raise bad_request(
            f"prompt holds {len(prompts)} prompts, each with {params.n} choices: at most {most} choices are "
            "made for one request",
            "n",
        )
    room = service.engine.max_model_len
    for i, prompt in enumerate(prompts):
        prompts[i] = params.truncated(prompt, room)
        if len(prompts[i]) < len(prompt):
            texts[i] = None  # an echo tells what was read
    style = LogprobStyle(
        service.text, body.logprobs or 0, service.names_tokens_by_id(body), params.skip_special_tokens
    )
    return _CompletionJob(
        service, body, params, prompts, texts, style, f"cmpl-{request_id}", model, echo_only
    )


def _best_of(body: CompletionRequest, params: SamplingParams) -> SamplingParams:
    """The settings under which as many choices are made as `best_of` says, so that they can be compared.

    Raises:
        ApiError: 400 for fewer than are wanted, or in a stream.
        RequestError: for more than may be.
    """
    most = body.best_of
    if most is None or most == params.n:
        return params
    if most < params.n:
        raise bad_request(f"best_of={most} is below n={params.n}: give at least as many", "best_of")
    if body.stream:
        raise bad_request(
            "best_of is not available in a stream, since all choices must have ended: set stream=false",
            "best_of",
        )
    try:
        return params.clone(n=most, logprobs=0 if params.logprobs is None else params.logprobs)
    except RequestError as error:
        raise named_by(error, {"n": "best_of"}) from None


def best(outputs: Sequence[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The `count` choices whose tokens are likeliest on average, the best first; all in their order where
    no more were made."""
    if len(outputs) <= count:
        return list(outputs)

    def mean(output: CompletionOutput) -> float:
        assert output.cumulative_logprob is not None
        return output.cumulative_logprob / max(1, len(output.token_ids))

    ranked = sorted(outputs, key=mean, reverse=True)[:count]
    return [replace(output, index=place) for place, output in enumerate(ranked)]


async def _prompts(service: Service, body: CompletionRequest) -> tuple[list[str | None], list[list[int]]]:
    """The request's prompts as texts (where given, or wanted for an echo) and as token ids."""
    texts: list[str | None]
    prompts: list[list[int]]
    given = body.prompt
    items: Sequence[str | int | list[int]] = [given] if isinstance(given, str) else given
    kinds = set(map(type, items))
    if kinds == {int}:
        items, kinds = [list(items)], {list}  # type: ignore[arg-type]
    if not items:
        raise bad_request("prompt is empty: give a text, token ids, or a list of them", "prompt")
    most = service.config.max_prompts_per_request
    if len(items) > most:
        raise bad_request(
            f"prompt holds {len(items)} prompts: at most {most} are allowed in one request", "prompt"
        )
    if kinds == {str}:
        texts = [str(item) for item in items]
        special = body.add_special_tokens is not False
        prompts = await asyncio.gather(*(service.text.encode(str(item), special, "prompt") for item in items))
    elif kinds == {list}:
        prompts = [list(item) for item in items]  # type: ignore[arg-type]
        texts = [None] * len(prompts)
    else:
        raise bad_request("prompt mixes texts and token ids: give one kind", "prompt")
    return texts, prompts


@dataclass
class _CompletionJob:
    """One completion request: its prompts run as one stream of results, told whole or in pieces.

    The choice of prompt p and choice c has index p·n + c. `_offsets` holds the characters told of each.
    """

    service: Service
    body: CompletionRequest
    params: SamplingParams
    prompts: list[list[int]]
    texts: list[str | None]
    style: LogprobStyle
    id: str
    model: str
    echo_only: bool
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)
    _decoded: set[int] = field(default_factory=set)  # prompts whose texts were made from their ids

    async def complete(self) -> Completion:
        """The whole answer."""
        usage = UsageCount()
        choices: list[CompletionChoice] = []
        async with aclosing(self._results()) as results:
            async for batch in results:
                for index, out in batch:
                    usage.prompt(index, out)
                    text = await self._echo_text(index, out)
                    for output in out.outputs:
                        usage.add(0 if self.echo_only else len(output.token_ids))
                    make = functools.partial(self._choices, index, out, text)
                    # Log-probabilities may be millions, which would hold up everybody's streams.
                    choices += await asyncio.to_thread(make) if self._tells_more else make()
        choices.sort(key=lambda choice: choice.index)
        return Completion(
            self.id,
            self.created,
            self.model,
            choices,
            usage.total(),
            synthetic_acceptance=self.service.synthetic,
        )

    def _choices(self, index: int, out: RequestOutput, echo: str) -> list[CompletionChoice]:
        """The choices of a prompt that has ended."""
        told = best(out.outputs, self.num_choices)
        return [self._choice(index, out, output, echo) for output in told]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer in pieces: one item per engine step."""
        forced = self.service.config.enable_force_include_usage
        with_usage, continuous = stream_usage(self.body.stream_options, forced)
        usage = UsageCount()
        plain = not (continuous or self.echo_only or self._tells_more)
        texts: dict[int, TextEvents] = {}  # by position, from the first result on
        async with aclosing(self._results()) as results:
            async for batch in results:
                events = []
                for index, out in batch:
                    if texts and is_text(out):
                        (output,) = out.outputs
                        if (plain_text := texts.get(self._position(index, output))) is not None:
                            usage.add(len(output.token_ids))
                            if output.text:
                                events.append(plain_text.event(output.text))
                            continue
                    usage.prompt(index, out)
                    for output in out.outputs:
                        first = self._position(index, output) not in self._offsets
                        usage.add(0 if self.echo_only else len(output.token_ids))
                        text = await self._echo_text(index, out) if first else ""
                        choice = self._choice(index, out, output, text, first)
                        if plain and first:
                            texts[choice.index] = self._text_events(choice.index, with_usage)
                        if (
                            choice.text
                            or choice.finish_reason
                            or choice.logprobs
                            or choice.token_ids
                            or continuous
                        ):
                            told = (usage.total() if continuous else None) if with_usage else UNSET
                            events.append(event(self._chunk([choice], told)))
                if events:
                    yield events[0] if len(events) == 1 else b"".join(events)
        if with_usage:
            yield event(self._chunk([], usage.total())) + DONE
        else:
            yield DONE

    @property
    def _tells_more(self) -> bool:
        """Whether chunks bring more than text."""
        body = self.body
        return body.logprobs is not None or bool(body.return_token_ids) or body.prompt_logprobs is not None

    def _text_events(self, position: int, with_usage: bool) -> TextEvents:
        """Chunks of a choice that bring text and nothing else."""

        def chunk(text: str) -> CompletionChunk:
            choice = CompletionChoice(position, text, None, None, None)
            return self._chunk([choice], None if with_usage else UNSET)

        return TextEvents(chunk)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None | UnsetType) -> CompletionChunk:
        marked = self.service.synthetic
        return CompletionChunk(self.id, self.created, self.model, choices, usage, synthetic_acceptance=marked)

    def _results(self) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        return self.service.results(
            self.prompts,
            self.params,
            self.id,
            exact=self.body.request_id is not None,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt,
            names={"structured_outputs": form_field(self.body)},
        )

    @property
    def num_choices(self) -> int:
        """Choices of a prompt that are told."""
        return self.params.n if self.body.best_of is None else self.body.n or 1

    def _position(self, index: int, output: CompletionOutput) -> int:
        return index * self.num_choices + output.index

    async def _echo_text(self, index: int, out: RequestOutput) -> str:
        if not self.body.echo:
            return ""
        text = self.texts[index]
        if text is None:
            self._decoded.add(index)
            text = self.texts[index] = await self.service.text.decode(
                self.prompts[index], skip_special_tokens=False
            )
        return text

    def _choice(
        self, index: int, out: RequestOutput, output: CompletionOutput, echo: str, first: bool = True
    ) -> CompletionChoice:
        position = self._position(index, output)
        ids = [] if self.echo_only else output.token_ids
        choice = CompletionChoice(
            index=position,
            text=echo if self.echo_only else echo + output.text,
            logprobs=self._logprobs(index, out, output, position, first),
            finish_reason=output.finish_reason,  # type: ignore[arg-type]  # others never get here
            stop_reason=stop_cause(output),
        )
        self._offsets.setdefault(position, 0)
        if self.body.return_token_ids:
            choice.token_ids = ids
            choice.prompt_token_ids = self.prompts[index] if first else UNSET
        if self.body.prompt_logprobs is not None and out.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(out.prompt_logprobs, self.style)
        return choice

    def _logprobs(
        self, index: int, out: RequestOutput, output: CompletionOutput, position: int, first: bool
    ) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        parts: list[tuple[LogprobStyle, Sequence[int], Sequence[PositionLogprobs | None]]] = []
        if self.body.echo and first:
            # A prompt of ids is shown with its special tokens, so that they have a place in the text.
            style = replace(self.style, skip_special=False) if index in self._decoded else self.style
            parts.append((style, self.prompts[index], out.prompt_logprobs or []))
        if not self.echo_only:
            parts.append((self.style, output.token_ids, output.logprobs or []))
        told: CompletionLogprobs | None = None
        for style, ids, positions in parts:
            if not ids:
                continue
            more, offset = completion_logprobs(ids, positions, style, self._offsets.get(position, 0))
            self._offsets[position] = offset
            if told is None:
                told = more
                continue
            for name in CompletionLogprobs.__struct_fields__:
                getattr(told, name).extend(getattr(more, name))
        return told
