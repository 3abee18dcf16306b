"""How the tokens of one request are chosen: the fields, their bounds, their defaults."""

from __future__ import annotations

import difflib
import math
import numbers
from enum import IntEnum
from typing import Any

import msgspec

from octavo.errors import ConfigError, RequestError
from octavo.structured_outputs import StructuredOutputsParams, structured_outputs_from
from octavo.vllm_names import SAMPLING, translated

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_STOP_TOTAL = 1 << 14
MAX_BAD_WORDS = 1024
MAX_BAD_TOTAL = 1 << 16
MAX_LOGIT_BIAS = 4096
MAX_TOKEN_IDS = (1 << 31) - 1
MAX_IDS = 1 << 20
"""Entries of a list of token ids: more than any vocabulary has."""
SEED_MODULUS = 1 << 64


class RequestOutputKind(IntEnum):
    """What each streamed result holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class _TakesVllmNames(msgspec.StructMeta):
    """What users construct may have vLLM's other fields; messages and copies pass by it."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        known = cls.__struct_fields__
        if args:
            raise RequestError(f"SamplingParams({_show(args[0])}) is not valid: give its fields by name")
        if foreign := fields.keys() - known:
            try:
                fields = translated(SAMPLING, fields)
            except ConfigError as error:
                raise RequestError(str(error), next(iter(sorted(foreign)))) from None
        for name in fields.keys() - known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"give {', '.join(known)}"
            raise RequestError(f"SamplingParams has no field {name}: {hint}", name)
        return super().__call__(**fields)


class SamplingParams(msgspec.Struct, metaclass=_TakesVllmNames, kw_only=True, omit_defaults=True):
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
    """Keeps that many of the likeliest tokens; 0 or -1: all."""
    min_p: float = 0.0
    """In [0, 1]; drops tokens less likely than min_p times the likeliest."""
    seed: int | None = None
    """Makes the choice reproducible, whatever else is in the batch. -1 is the same as None."""
    stop: str | list[str] | None = None
    """Strings that end the text."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the text."""
    bad_words: list[str] | None = None
    """Words that may not be produced."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text tokens."""
    max_tokens: int | None = 16
    """Most tokens of the output; None: as many as the context holds."""
    min_tokens: int = 0
    """Tokens before which neither EOS nor stop_token_ids may come."""
    logprobs: int | None = None
    """Log-probabilities of that many likeliest tokens, besides the chosen one's; -1: all."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    detokenize: bool = True
    """False: token ids only, no text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Without effect: the tokenizers that are supported put no spaces there."""
    logit_bias: dict[int, float] | None = None
    """Token id to a number in [-100, 100] that is added to its logit."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be produced."""
    truncate_prompt_tokens: int | None = None
    """Keep that many tokens of the prompt's end; -1: as many as leave room for max_tokens."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have: a JSON schema, an expression, a choice or a grammar."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each result of a stream holds: all so far, what is new, or nothing before the end."""

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else _list("stop", self.stop)
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
        self.bad_words = _list("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias) or None
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1 and self.seed is not True:  # as in vLLM
            self.seed = None
        self.structured_outputs = structured_outputs_from(self.structured_outputs)
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        self._check_numbers()
        self._check_others()

    def _check_numbers(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_N)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number(
            "repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True
        )
        self.temperature = _number("temperature", self.temperature, 0.0, math.inf)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        self.top_k = _integer("top_k", self.top_k, 0, None, note="0 keeps all tokens")
        self.top_k = min(self.top_k, MAX_TOKEN_IDS)  # more than any vocabulary, and messages hold 64 bits
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(1 << 63), SEED_MODULUS - 1)
        if self.max_tokens is not None:
            # More than any context, and no number that messages or figures don't hold.
            self.max_tokens = min(_integer("max_tokens", self.max_tokens, 1, None), MAX_TOKEN_IDS)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: lower it", "min_tokens"
            )
        if self.truncate_prompt_tokens not in (None, -1):
            self.truncate_prompt_tokens = _integer(
                "truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None, note="-1 is what fits"
            )
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, -1, None, note="-1 is the whole vocabulary")
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _integer(
                "prompt_logprobs", self.prompt_logprobs, -1, None, note="-1 is the whole vocabulary"
            )

    def _check_others(self) -> None:
        _strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_TOTAL)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_TOTAL)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} is not valid: give true or false", name)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: set detokenize=True or use stop_token_ids", "stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty: name at least one token", "allowed_token_ids")
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise RequestError(
                f"output_kind={self.output_kind!r} is not valid: give a RequestOutputKind", "output_kind"
            ) from None

    def check_vocabulary(self, vocab_size: int, max_logprobs: int = -1) -> None:
        """Check what depends on the model: token ids, and how many log-probabilities are allowed.

        Args:
            vocab_size: tokens are ids below it.
            max_logprobs: the engine's limit, -1 for none.

        Raises:
            RequestError: an id outside the vocabulary, or more log-probabilities than allowed.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            ids = getattr(self, name)
            if ids and (highest := max(ids)) >= vocab_size:
                raise RequestError(
                    f"{name} holds token {highest}: the vocabulary has ids 0 to {vocab_size - 1}", name
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and max_logprobs >= 0 and (count == -1 or count > max_logprobs):
                raise RequestError(
                    f"{name}={count} is above this engine's limit of {max_logprobs}: ask for fewer, or raise "
                    "max_logprobs",
                    name,
                )
            if count is not None and count > vocab_size:
                raise RequestError(
                    f"{name}={count} is above the vocabulary's {vocab_size} tokens: -1 asks for all", name
                )

    def truncated(self, prompt: list[int], max_model_len: int) -> list[int]:
        """A prompt's end, as `truncate_prompt_tokens` asks. One that leaves no room at all keeps a token,
        and is refused where its length is checked."""
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        return prompt[-(max(1, max_model_len - (self.max_tokens or 1)) if most == -1 else most) :]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-5

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)


_SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if good else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number > high or number < low or (open_low and number == low):
        bounds = f"{'above' if open_low else 'at least'} {low:g}" + (
            f" and at most {high:g}" if high != math.inf else ", finite"
        )
        raise RequestError(f"{name}={_show(value)} is not valid: give a number {bounds}", name)
    return number


def _integer(name: str, value: Any, low: int, high: int | None, note: str = "") -> int:
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(
            f"{name}={_show(value)} is not valid: give an integer {bounds}" + (f" ({note})" if note else ""),
            name,
        )
    return int(value)


def _show(value: Any) -> str:
    """A value as an error shows it: on one line, and not a megabyte of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _list(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name}={_show(value)} is not valid: give a list", name)
    return list(value)


def _token_ids(name: str, value: Any) -> list[int]:
    ids = _list(name, value)
    if len(ids) > MAX_IDS:
        raise RequestError(f"{name} has {len(ids)} entries: at most {MAX_IDS} are allowed", name)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_IDS:
        return ids  # a quarter of a vocabulary, say, each of which would be looked at below
    return [_integer(name, token, 0, MAX_TOKEN_IDS) for token in ids]


def _strings(name: str, values: Any, most: int, most_chars: int) -> None:
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} strings: at most {most} are allowed", name)
    for value in values:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} holds {_show(value)}: give non-empty strings", name)
        if len(value) > MAX_STOP_LENGTH:
            raise RequestError(
                f"{name} holds a string of {len(value)} characters: at most {MAX_STOP_LENGTH} are allowed",
                name,
            )
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{name} holds {_show(value)}: lone surrogates are not text", name) from None
    if (chars := sum(map(len, values))) > most_chars:
        raise RequestError(f"{name} has {chars} characters: at most {most_chars} are allowed", name)


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise RequestError(f"logit_bias={_show(bias)} is not valid: map token ids to numbers", "logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(bias)} entries: at most {MAX_LOGIT_BIAS} are allowed", "logit_bias"
        )
    out: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token = int(key) if isinstance(key, str) else key  # JSON has no other keys than strings
        except ValueError:
            token = key
        if not isinstance(token, numbers.Integral):
            raise RequestError(f"logit_bias has the key {_show(key)}: keys are token ids", "logit_bias")
        token = _integer("logit_bias", token, 0, MAX_TOKEN_IDS, note="keys are token ids")
        try:
            out[token] = _number(f"logit_bias[{token}]", value, -100.0, 100.0)
        except RequestError as error:
            raise RequestError(str(error), "logit_bias") from None
    return out
