"""The two forms of a prompt that is a dictionary; names and keys are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class _Salted(TypedDict, total=False):
    cache_salt: str
    """Keeps the cached prefixes of one tenant from the others'."""


class TextPrompt(_Salted):
    """A text, which the model's tokenizer cuts into tokens."""

    prompt: str


class TokensPrompt(_Salted):
    """Token ids, taken as they are."""

    prompt_token_ids: Sequence[int]
