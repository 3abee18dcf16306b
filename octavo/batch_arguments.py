"""Arguments of `LLM`'s calls that are given once for all prompts, or once for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

from octavo.engine.input_processor import Prompt
from octavo.errors import RequestError

_T = TypeVar("_T")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts.

    Raises:
        RequestError: neither.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {type(prompts).__name__}: give text, token ids, or a list of them", "prompt"
        )
    items = list(prompts)
    if not items:
        return []
    if all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)]
    return cast("list[Prompt]", items)


def one_each(name: str, given: Any, kind: type[_T], count: int, what: str = "prompts") -> list[_T]:
    """The settings of each prompt.

    Args:
        name: the argument's.
        given: settings for all, or a list of them.
        kind: their class.
        count: how many prompts there are.
        what: what these are called.

    Raises:
        RequestError: something else, or another number of them.
    """
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(params, kind) for params in given):
        raise RequestError(f"{name} is not valid: give {kind.__name__}, or a list of them")
    if len(given) != count:
        raise RequestError(f"{len(given)} {name} for {count} {what}: give one, or one each")
    return list(given)
