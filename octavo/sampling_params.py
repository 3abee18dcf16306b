"""How the tokens of one request are chosen: the fields, their bounds, their defaults."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import msgspec

from octavo.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIAS = 4096
SEED_MODULUS = 1 << 64


class RequestOutputKind(IntEnum):
    """What each streamed result holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling settings of one request, with vLLM's names and defaults.

    The order in which they act on a row of logits: logit_bias, allowed_token_ids, bad_words,
    min_tokens, repetition / presence / frequency penalty, temperature, min_p, top_k, top_p; then
    one Gumbel-max draw that depends on (seed, position) alone.

    Raises:
        RequestError: a value out of its bounds; the message names it.
    """

    n: int = 1
    """Choices per prompt."""
    presence_penalty: float = 0.0
    """In [-2, 2]; subtracted once from tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; subtracted once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """> 0; divides positive and multiplies negative logits of tokens in prompt or output."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]; the smallest set of tokens whose probability reaches it."""
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    """In [0, 1]; drops tokens less likely than min_p times the likeliest."""
    seed: int | None = None
    """Makes the choice reproducible, whatever else is in the batch."""
    stop: str | list[str] | None = None
    """Strings that end the text."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the text."""
    bad_words: list[str] | None = None
    """Words that may not be produced."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as the context holds."""
    min_tokens: int = 0
    """Tokens before which neither EOS nor stop_token_ids may come."""
    logprobs: int | None = None
    """Log-probabilities of that many likeliest tokens, besides the chosen one's; -1: all."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    """Token id to a number in [-100, 100] that is added to its logit."""
    allowed_token_ids: list[int] | None = None
    structured_outputs: Any = None
    """Not built yet: refused."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        if self.top_k == -1:
            self.top_k = 0
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        self._check()

    def _check(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, None, note="0 keeps all tokens")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), SEED_MODULUS - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: lower it", "min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, -1, None)
        self._check_lists()
        if self.structured_outputs is not None:
            raise RequestError(
                "structured_outputs is not supported by this version: leave it out", "structured_outputs"
            )

    def _check_lists(self) -> None:
        _strings("stop", self.stop, MAX_STOP_STRINGS)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: set detokenize=True or use stop_token_ids", "stop")
        for token in self.stop_token_ids or ():
            _integer("stop_token_ids", token, 0, (1 << 31) - 1)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: name at least one token", "allowed_token_ids")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0, (1 << 31) - 1)
        if self.logit_bias:
            self.logit_bias = _logit_bias(self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-5

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    bounds = f"{'above' if open_low else 'at least'} {low:g}" + (
        f" and at most {high:g}" if high != math.inf else ", finite"
    )
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value > high or value < low or (open_low and value == low):
        raise RequestError(f"{name}={value!r} is not valid: give a number {bounds}", name)


def _integer(name: str, value: Any, low: int, high: int | None, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(
            f"{name}={value!r} is not valid: give an integer {bounds}" + (f" ({note})" if note else ""), name
        )


def _strings(name: str, values: Any, most: int) -> None:
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} strings: at most {most} are allowed", name)
    for value in values:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} holds {value!r}: give non-empty strings", name)
        if len(value) > MAX_STOP_LENGTH:
            raise RequestError(
                f"{name} holds a string of {len(value)} characters: at most {MAX_STOP_LENGTH} are allowed", name
            )


def _logit_bias(bias: Any) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries: at most {MAX_LOGIT_BIAS} are allowed", "logit_bias")
    out: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise RequestError(f"logit_bias has the key {key!r}: keys are token ids", "logit_bias") from None
        _integer("logit_bias token", token, 0, (1 << 31) - 1)
        _number(f"logit_bias[{token}]", value, -100.0, 100.0)
        out[token] = float(value)
    return out
