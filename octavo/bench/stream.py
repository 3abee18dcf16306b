"""One streamed answer of the OpenAI API, taken apart as it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from octavo.bench.client import HttpResponse


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class PromptDetails(Struct):
    """Of the prompt's tokens, those that the prefix cache served."""

    cached_tokens: int | None = None


class Usage(Struct):
    """The server's own counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    synthetic_acceptance: list[float] | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Answer:
    """What a request got.

    Attributes:
        times: of arrival (`time.perf_counter`) of each chunk that brought text; a chat's first chunk, which
            tells the role alone, is none.
        last: time of the last chunk with a choice.
        error: why the answer is incomplete; None if it is whole.
        synthetic: by which drafts stood, as the server says; None: the model judged them.
    """

    times: list[float] = field(default_factory=list)
    last: float = 0.0
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    status: int | None = None
    synthetic: list[float] | None = None
    _done: bool = False

    def on_event(self, now: float, data: bytes) -> None:
        """Take one event."""
        if data == b"[DONE]":
            self._done = True
            return
        if not data:
            return
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.error = self.error or f"a chunk is not the OpenAI API's ({error})"
            return
        if chunk.error is not None:
            self.error = f"error in the stream: {error_text(chunk.error)}"
        self.synthetic = chunk.synthetic_acceptance or self.synthetic
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices or ():
            self.last = now
            delta = choice.delta
            if choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)):
                self.times.append(now)
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason

    def end(self, response: HttpResponse) -> None:
        """The response is complete: judge it."""
        self.status = response.status
        if response.status != 200:
            self.error = f"HTTP {response.status}: {error_text(response.body)}"
        elif self.error is None and not (self._done or self.finish_reason):
            self.error = "the stream ended early" if self.last else "the answer is not a stream"


def error_text(error: Any) -> str:
    """The text of an error (or of the body that holds it), on one line and not a page of it."""
    if isinstance(error, bytes):
        try:
            error = msgspec.json.decode(error)
        except (msgspec.DecodeError, UnicodeDecodeError):
            error = error.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(error, dict):
            error = error.get(name) or error
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
