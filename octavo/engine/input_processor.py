"""From what a user asks to what the engine core takes: tokenize, check, clamp, seed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from octavo.config import EngineConfig
from octavo.errors import CONTEXT_LENGTH_EXCEEDED, ModelError, RequestError
from octavo.generation_defaults import overridden
from octavo.inputs import TextPrompt, TokensPrompt
from octavo.messages import CoreRequest
from octavo.models.config import ModelConfig
from octavo.models.loader import load_generation_config, load_model_config
from octavo.models.locate import configured_model, configured_tokenizer
from octavo.models.pooling_config import pooling_settings
from octavo.sampling.noise import choice_seed
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.step_messages import ModelFacts
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | dict[str, Any]

MAX_SALT_LENGTH = 128
MOST_HELD = 1 << 25
"""Token ids of all choices of a prompt together: 128 choices of a context of 256 thousand tokens."""
_FINAL_ONLY = RequestOutputKind.FINAL_ONLY
_SALT_FORBIDDEN = "/@\\\0"
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass
class PreparedRequest:
    """A checked request: what the user gave, and one core request per choice."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    choices: list[CoreRequest]


class InputProcessor:
    """Owns the tokenizer and the model's limits; makes core requests of prompts.

    Raises (on construction):
        ConfigError, ModelError: no tokenizer, or an unreadable one.
    """

    def __init__(self, config: EngineConfig):
        source = configured_model(config)
        # What runs the model must take the commit that is described here, and need not ask the hub again.
        self.config = config = replace(config, revision=source.revision) if source.revision else config
        self.model_name = source.name
        self.model_config = load_model_config(source, config.model_impl)
        self.pooling = pooling_settings(config, source, self.model_config)  # None: the model makes texts
        stated = load_generation_config(source) if config.generation_config == "auto" else {}
        override = config.override_generation_config
        assert not isinstance(override, str)  # read by then
        self.generation_defaults = overridden(stated, override)
        self.tokenizer: Tokenizer | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(configured_tokenizer(config, source))
        self.eos_token_ids = end_tokens(self.model_config, self.tokenizer)
        try:
            self.default_params()
        except RequestError as error:
            raise ModelError(
                f"{self.model_name}: its generation config is wrong ({error}): correct it, or set "
                "generation_config='none'"
            ) from None
        if self.most_output_tokens is not None:
            logger.info(
                "max_new_tokens of the generation config: answers have %d tokens at most",
                self.most_output_tokens,
            )
        self._seeds = random.Random(config.seed)
        self._serial = itertools.count()
        self._facts: ModelFacts | None = None

    @property
    def facts(self) -> ModelFacts:
        """Limits of the running engine."""
        assert self._facts is not None, "the engine has not started"
        return self._facts

    @facts.setter
    def facts(self, facts: ModelFacts) -> None:
        self._facts = facts
        # Files name ids that the model cannot produce: -1 for none, or tokens beyond its embedding.
        self.eos_token_ids = [token for token in self.eos_token_ids if 0 <= token < facts.vocab_size]

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: there is none, because of `skip_tokenizer_init`.
        """
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, but skip_tokenizer_init is set: give token ids")
        return self.tokenizer

    def default_params(self) -> SamplingParams:
        """Sampling settings for a request that brings none: the model's own, where it states some."""
        return SamplingParams(**self.generation_defaults)

    @property
    def most_output_tokens(self) -> int | None:
        """What a server's answers keep within (`max_new_tokens` of the generation config); None: anything."""
        return self.generation_defaults.get("max_tokens")

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: Any = None,
    ) -> PreparedRequest:
        """Check a request and make one core request per choice.

        Args:
            prompt: text, token ids, or a dictionary with `prompt` or `prompt_token_ids` (and `cache_salt`).
            params: sampling settings.
            request_id: the user's name for it; None draws one.
            priority: lower runs first, under the priority policy.
            cache_salt: keeps the request's cached prefix apart from those of other salts.
            lora_request: not supported yet.

        Raises:
            RequestError: whatever is wrong with it, in one line.
        """
        if self.pooling is not None:
            raise RequestError(
                f"{self.model_name} is loaded for embeddings, not for texts: use embed (/v1/embeddings), or "
                "name a model that makes texts"
            )
        if lora_request is not None:
            raise RequestError("lora_request is not supported by this version: leave it out", "lora_request")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {type(params).__name__}: give SamplingParams")
        text, ids, salt = self.read_prompt(prompt)
        cache_salt = cache_salt if cache_salt is not None else salt
        check_salt(cache_salt)
        check_priority(priority)
        if ids is None:
            assert text is not None
            ids = self.need_tokenizer("a prompt of text").encode(text)
        self.check_ids(ids)
        ids = params.truncated(ids, self.facts.max_model_len)
        params.check_vocabulary(self.facts.vocab_size, self.config.max_logprobs)
        params = self._clamped(params, len(ids))
        if params.structured_outputs is not None:
            self.need_tokenizer("structured_outputs")
        bad_words = self._bad_words(params)
        self._check_choice(params, bad_words)
        _check_weight(params, ids, bad_words)
        request_id = request_id or secrets.token_hex(8)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        first = others = params if params.n == 1 else params.clone(n=1)
        if params.prompt_logprobs is not None and params.n > 1 and params.output_kind == _FINAL_ONLY:
            # They are told once all choices have ended, so that one computes and holds them for all.
            others = first.clone(prompt_logprobs=None)
        common = dict(
            prompt_token_ids=ids,
            eos_token_ids=[] if params.ignore_eos else self.eos_token_ids,
            bad_words_ids=bad_words,
            arrival_time=time.time(),
            priority=priority,
            cache_salt=cache_salt,
            # Stop strings are found in the text, so the front end must see tokens as they come.
            stream=params.output_kind != _FINAL_ONLY or bool(params.stop),
        )
        choices = [
            CoreRequest(
                # Never used again, so that late news of a request that was given up cannot be taken for
                # news of a later one under the same name.
                request_id=f"{request_id}#{next(self._serial)}",
                params=others if index else first,
                seed=choice_seed(seed, index),
                **common,  # type: ignore[arg-type]
            )
            for index in range(params.n)
        ]
        return PreparedRequest(request_id, text, ids, params, choices)

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
        """(text, ids, salt) of a prompt in any of its forms."""
        salt = None
        if isinstance(prompt, dict):
            unknown = set(prompt) - _PROMPT_KEYS
            if unknown:
                raise RequestError(
                    f"prompt has the keys {sorted(unknown)}, which this version does not support: "
                    f"give {', '.join(sorted(_PROMPT_KEYS))}",
                    "prompt",
                )
            given = cast("dict[str, Any]", prompt)
            salt, ids, text = (given.get(key) for key in ("cache_salt", "prompt_token_ids", "prompt"))
            if ids is None and not isinstance(text, str):
                raise RequestError("prompt is a dictionary without prompt or prompt_token_ids", "prompt")
            return text, None if ids is None else _as_ids(ids), salt
        if isinstance(prompt, str):
            return prompt, None, None
        return None, _as_ids(prompt), None

    def check_ids(self, ids: list[int]) -> None:
        """Raises: RequestError: no token, or one that the vocabulary lacks."""
        if not ids:
            raise RequestError("prompt is empty: give at least one token", "prompt")
        vocab = self.facts.vocab_size
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
            return
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise RequestError(
                    f"prompt holds the token id {token!r}: ids are integers from 0 to {vocab - 1}", "prompt"
                )

    def _clamped(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """`max_tokens` brought within the context; requests that can never fit are refused."""
        limit, capacity = self.facts.max_model_len, self.facts.kv_capacity
        room = limit - prompt_len
        if room < 1:
            raise RequestError(
                f"prompt has {prompt_len} tokens, and this model's maximum context length is {limit} tokens "
                "(max_model_len), in which the answer needs room: shorten the prompt",
                "prompt",
                CONTEXT_LENGTH_EXCEEDED,
            )
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        # The last token's KV is never needed.
        if prompt_len + (1 if params.max_tokens is None else wanted) - 1 > capacity:
            raise RequestError(
                f"prompt of {prompt_len} tokens and max_tokens of {wanted} need more KV cache than there is "
                f"({capacity} tokens): shorten the prompt, lower max_tokens, or give the cache more memory",
                "max_tokens",
            )
        wanted = min(wanted, capacity - prompt_len + 1)
        if params.min_tokens > wanted:
            raise RequestError(
                f"min_tokens={params.min_tokens} is above the {wanted} tokens left by the prompt",
                "min_tokens",
            )
        return params if params.max_tokens == wanted else params.clone(max_tokens=wanted)

    def _check_choice(self, params: SamplingParams, bad_words: list[list[int]]) -> None:
        """Refuse settings under which no token may be chosen."""
        vocab = self.facts.vocab_size
        barred = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            barred.update(params.stop_token_ids or (), () if params.ignore_eos else self.eos_token_ids)
        if params.allowed_token_ids is not None:
            if barred.issuperset(params.allowed_token_ids):
                raise RequestError(
                    "allowed_token_ids holds only tokens that bad_words forbids, or that end the text while "
                    "min_tokens forbids this: allow another token",
                    "allowed_token_ids",
                )
        elif sum(0 <= token < vocab for token in barred) == vocab:
            raise RequestError(
                "every token is forbidden by bad_words, or by min_tokens since it would end the text "
                "(stop_token_ids): leave one free",
                "stop_token_ids" if params.min_tokens else "bad_words",
            )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of each word, as it is written at a text's start and after a space."""
        if not params.bad_words:
            return []
        tokenizer = self.need_tokenizer("bad_words")
        sequences: list[list[int]] = []
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences


def _check_weight(params: SamplingParams, ids: list[int], bad_words: list[list[int]]) -> None:
    """Refuse a request of which the engine would have too much to hold: each choice has all of it."""
    held = len(ids) + len(params.allowed_token_ids or ()) + len(params.stop_token_ids or ())
    held += sum(map(len, bad_words))
    if held * params.n > MOST_HELD:
        raise RequestError(
            f"n={params.n} choices of {held} token ids each (the prompt's, allowed_token_ids, stop_token_ids "
            f"and bad_words) are more than {MOST_HELD}: lower n",
            "n",
        )


def end_tokens(model: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    """Tokens that end a text, by the model's settings and its tokenizer's; some may not exist."""
    return sorted({*model.eos_token_ids, *(() if tokenizer is None else tokenizer.eos_token_ids)})


def _as_ids(value: Any) -> list[int]:
    """Token ids as a list; whether they are any is checked later."""
    if not isinstance(value, (str, bytes, bytearray)):
        with contextlib.suppress(TypeError):
            return list(value)
    raise RequestError(f"prompt is {type(value).__name__}: give text or a list of token ids", "prompt")


def check_priority(priority: Any) -> None:
    """Check a priority.

    Raises:
        RequestError: no integer, or one that the scheduler's arrays don't hold.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 1 << 31:
        raise RequestError(f"priority={priority!r:.80} is not valid: give an integer of 32 bits", "priority")


def check_salt(salt: Any) -> None:
    """Check a cache salt.

    Raises:
        RequestError: empty, too long, or with a character that is forbidden.
    """
    if salt is None:
        return
    if not isinstance(salt, str) or not salt or len(salt) > MAX_SALT_LENGTH:
        raise RequestError(
            f"cache_salt is not valid: give a text of 1 to {MAX_SALT_LENGTH} characters", "cache_salt"
        )
    bad = [c for c in _SALT_FORBIDDEN if c in salt]
    if bad:
        raise RequestError(
            f"cache_salt holds the character {bad[0]!r}: leave out / @ \\ and NUL", "cache_salt"
        )
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise RequestError("cache_salt holds a lone surrogate: give valid Unicode", "cache_salt") from None
