"""How the embedding of one text is made: the fields, their bounds, their defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import RequestError


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Settings of one embedding, with vLLM's names.

    Raises:
        RequestError: a value out of its bounds; the message names it.
    """

    dimensions: int | None = None
    """Leading numbers to keep (Matryoshka representations, arXiv 2205.13147); None: all."""
    normalize: bool | None = None
    """Whether the embedding gets length 1, after `dimensions`; None: as the model does."""
    truncate_prompt_tokens: int | None = None
    """Tokens of the text's beginning that are read, special tokens included; -1: as many as the model
    takes; None: longer texts are refused."""

    def __post_init__(self) -> None:
        for name, lowest in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value: Any = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest or value == 0:
                raise RequestError(
                    f"{name}={value!r} is not valid: give a positive integer"
                    + (", or -1 for what the model takes" if lowest < 0 else ""),
                    name,
                )
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise RequestError(f"normalize={self.normalize!r} is not valid: give True or False", "normalize")
