"""Text work of the server, off the event loop: chat templates, tokenization, token texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from octavo.errors import CONTEXT_LENGTH_EXCEEDED
from octavo.server.errors import bad_request

T = TypeVar("T")

CHARS_PER_TOKEN = 128
"""More than any token of the families served stands for (their longest are runs of 128 spaces), so a
longer text cannot fit the context."""


class Tokenizer(Protocol):
    """What the server asks of `octavo.tokenization`'s tokenizer. All methods are thread-safe."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...

    def byte_table(self, skip_special_tokens: bool) -> Mapping[int, bytes]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation and how it becomes a prompt."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    chat_template: str | None
    template_kwargs: dict[str, Any]
    tools: list[dict[str, Any]] | None = None


class TextService:
    """Owns the threads that tokenize. Texts too long for the context are refused before any work."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        vocab_size: int,
        threads: int,
        chat_template: str | None = None,
    ):
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_chars = max_model_len * CHARS_PER_TOKEN
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="octavo-text")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: 400 when the server was started without one.
        """
        if self._tokenizer is None:
            raise bad_request(
                "this server runs without a tokenizer: send token ids to /v1/completions, or start it "
                "without --skip-tokenizer-init"
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be served at all."""
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be served."""
        if self._tokenizer is None:
            return False
        return self._chat_template is not None or self._tokenizer.has_chat_template

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text.

        Raises:
            ApiError: 400 when the text cannot fit the context.
        """
        self._check_length(len(text), param)
        return await self._run(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: 400 when it cannot fit the context, or the template refuses it.
        """
        self._check_length(sum(_characters(m["content"]) for m in prompt.messages), "messages")
        return await self._run(lambda: self._render(prompt))

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids.

        Raises:
            ApiError: 400 for an id outside the vocabulary.
        """
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.vocab_size:
                raise bad_request(
                    f"token id {token} is outside the vocabulary of {self.vocab_size}", "tokens"
                )
        return await self._run(lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int, skip_special: bool = False) -> bytes:
        """UTF-8 bytes that a token adds to a text; none for a special token that the text leaves out."""
        return b"" if self._tokenizer is None else self._tokenizer.byte_table(skip_special)[token_id]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token's text, special ones included; pieces of characters as U+FFFD."""
        table = self.tokenizer.byte_table(False)
        return [table[token].decode("utf-8", "replace") for token in ids]

    def special_id(self, text: str) -> int | None:
        """The id of the special token that a text is, if it is one."""
        if self._tokenizer is None:
            return None
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and not self.token(ids[0], skip_special=True) else None

    def ending(self, ids: Sequence[int], tokens: int = 32) -> str:
        """The text of the last tokens, special ones included."""
        return b"".join(self.token(token) for token in ids[-tokens:]).decode("utf-8", "replace")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _render(self, prompt: ChatPrompt) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            prompt.messages,
            chat_template=prompt.chat_template or self._chat_template,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            **({"tools": prompt.tools} if prompt.tools else {}),
            **prompt.template_kwargs,
        )
        self._check_length(len(text), "messages")
        return self.tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)

    def _check_length(self, chars: int, param: str) -> None:
        if chars > self.max_chars:
            raise bad_request(
                f"{param} has {chars} characters, and this model's maximum context length is "
                f"{self.max_model_len} tokens: shorten it",
                param,
                CONTEXT_LENGTH_EXCEEDED,
            )

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _characters(content: Any) -> int:
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content)
    return len(content or "")
