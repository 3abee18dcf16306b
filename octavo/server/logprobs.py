"""Log-probabilities of the engine in the forms of the completion and the chat API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.outputs import PositionLogprobs
from octavo.server.protocol.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from octavo.server.text import TextService

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold (OpenAI's convention)."""


@dataclass(frozen=True)
class LogprobStyle:
    """How tokens are named: `as_ids` writes `token_id:N`; skipped special tokens add no bytes to the text."""

    text: TextService
    top: int
    as_ids: bool = False
    skip_special: bool = True

    def name(self, token_id: int, printable_bytes: bool = False) -> str:
        """A token for people; pieces of characters as U+FFFD, or as `bytes:\\xe2\\x80` if wanted."""
        if self.as_ids or not self.text.has_tokenizer:
            return f"token_id:{token_id}"
        raw = self.text.token(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            if printable_bytes:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            return raw.decode("utf-8", "replace")

    def bytes(self, token_id: int) -> list[int]:
        """The token's UTF-8 in the text."""
        return list(self.text.token(token_id, self.skip_special))


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], style: LogprobStyle
) -> ChatLogprobs:
    """Log-probabilities of some tokens in the chat API's form."""
    content = []
    for token, entries in zip(token_ids, positions, strict=True):
        top = [
            TopLogprob(style.name(t), value, style.bytes(t)) for t, value in _likeliest(entries, style.top)
        ]
        value = _finite(entries[token].logprob)
        content.append(TokenLogprob(style.name(token), value, style.bytes(token), top))
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], style: LogprobStyle, offset: int
) -> tuple[CompletionLogprobs, int]:
    """The same in the completion API's form: the likeliest tokens and the chosen one.

    Args:
        offset: characters of the text before these tokens.

    Returns:
        the log-probabilities and the offset after the tokens.
    """
    out = CompletionLogprobs([], [], [], [])
    for token, entries in zip(token_ids, positions, strict=True):
        out.text_offset.append(offset)
        out.tokens.append(style.name(token, printable_bytes=True))
        # Characters that begin in this token: a piece of a character counts where its first byte is.
        offset += sum(byte & 0xC0 != 0x80 for byte in style.text.token(token, style.skip_special))
        if entries is None:
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            continue
        chosen = _finite(entries[token].logprob)
        out.token_logprobs.append(chosen)
        # The chosen token is told whether it is one of them or not, as OpenAI and vLLM do.
        named = {out.tokens[-1]: chosen}
        for other, value in _likeliest(entries, style.top):
            named.setdefault(style.name(other, printable_bytes=True), value)
        out.top_logprobs.append(named)
    return out, offset


def prompt_logprobs(positions: Sequence[PositionLogprobs | None], style: LogprobStyle) -> PromptLogprobs:
    """vLLM's `prompt_logprobs` field: per position, token ids (as strings) and log-probabilities."""
    return [
        None
        if entries is None
        else {str(t): PromptLogprob(_finite(e.logprob), e.rank, style.name(t)) for t, e in entries.items()}
        for entries in positions
    ]


def _likeliest(entries: PositionLogprobs, top: int) -> list[tuple[int, float]]:
    """The `top` likeliest (-1: all), without the chosen token unless it is one of them."""
    ranked = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return [(token, _finite(entry.logprob)) for token, entry in (ranked if top < 0 else ranked[:top])]


def _finite(value: float) -> float:
    return max(value, LOWEST)
