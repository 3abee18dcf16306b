"""Grammars by llguidance: an Earley parser over derivatives of regular expressions, within set bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from octavo.errors import RequestError
from octavo.sampling.structured.backend import Backend, Grammar, GrammarState, Vocabulary
from octavo.sampling.structured.json_runs import JsonRuns, RunTokens
from octavo.sampling.structured.lark import after_reasoning, as_lark, structural_tags
from octavo.sampling.structured.refusals import explained
from octavo.sampling.structured.schema import prepare_schema
from octavo.structured_outputs import StructuredOutputsParams

_FIELD = "structured_outputs"
_MAX_MESSAGE = 300
_TOO_HARD = "the form is too hard to follow"

# An expression like (a{1000}){1000} otherwise takes seconds for one mask, and hundreds of megabytes.
_LIMITS: dict[str, Any] = dict(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class _Tokens:
    """A vocabulary as the library asks for it."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary):
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special_ids)
        self.eos_ids = list(vocabulary.eos_ids)
        if not self.eos_ids:  # the library needs one: a token that no model can produce
            self.eos_ids = [len(self.tokens)]
            self.special_token_ids.append(len(self.tokens))
            self.tokens.append(b"<end>")
        self.eos_token_id = self.eos_ids[0]
        self.bos_token_id = None
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


class LLGuidanceBackend(Backend):
    """Owns the library's copies of the vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        tokens = _Tokens(vocabulary)
        self._vocabulary = vocabulary
        plain: Any = tokens
        self._text = LLTokenizer(plain, n_vocab=len(tokens.tokens), eos_token=tokens.eos_ids)
        self._json = self._text.with_slices(LLTokenizer.json_slices())
        self._run_tokens = RunTokens(vocabulary.tokens, vocabulary.num_words)
        self._limits = LLParserLimits(**_LIMITS)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """See `Backend`."""
        # The bounds on JSON's runs count from a text's first character: reasoning is none.
        is_json = (
            params.kind in ("json", "json_object") or (params.kind == "grammar" and "%json" in params.text)
        ) and params.reasoning_end is None
        tokenizer = self._json if is_json else self._text
        try:
            source = _source(params) if params.reasoning_end is None else self._after_reasoning(params)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=self._limits)
        except RequestError:
            raise
        except (ValueError, AssertionError) as error:  # what the library's Python part raises
            raise _refusal(params.kind, str(error)) from None
        if matcher.is_error():
            raise _refusal(params.kind, self._explained(params, matcher.get_error()))
        return _LLGrammar(params.kind, matcher, self._vocabulary, self._run_tokens if is_json else None)

    def _explained(self, params: StructuredOutputsParams, message: str) -> str:
        """The library's message in words about what was asked for, where these are known."""

        def refuses(schema: dict[str, Any]) -> str | None:
            source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
            matcher = LLMatcher(self._json, source, log_level=0, limits=self._limits)
            return matcher.get_error() if matcher.is_error() else None

        schema = prepare_schema(json.loads(params.text)) if params.kind == "json" else {}
        return explained(schema, message, refuses) or message

    def _after_reasoning(self, params: StructuredOutputsParams) -> str:
        """A form that begins after free text, in the library's own language."""
        assert params.reasoning_end is not None
        form = as_lark(params)
        return LLMatcher.grammar_from_lark(
            after_reasoning(form, params.reasoning_start, params.reasoning_end, self._special_id)
        )

    def _special_id(self, text: str) -> int | None:
        """The special token that a text is, if any."""
        ids = self._vocabulary.encode(text)
        return ids[0] if len(ids) == 1 and ids[0] in self._vocabulary.special_ids else None


class _LLGrammar(Grammar):
    def __init__(self, kind: str, matcher: LLMatcher, vocabulary: Vocabulary, run_tokens: RunTokens | None):
        self._matcher, self._vocabulary, self._run_tokens = matcher, vocabulary, run_tokens
        state = _LLState(matcher.deep_copy(), vocabulary, run_tokens)
        self.first_mask = np.zeros(vocabulary.num_words, np.int32)
        try:
            state.fill_mask(self.first_mask)
        except RequestError as error:
            raise _refusal(kind, str(error)) from None
        texts = self.first_mask.copy()
        for token in vocabulary.eos_ids:
            texts.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
        if not texts.any():
            raise _refusal(kind, "it allows no text but an empty one")
        self.first_mask.flags.writeable = False

    def new_state(self) -> GrammarState:
        """See `Grammar`."""
        return _LLState(self._matcher.deep_copy(), self._vocabulary, self._run_tokens)


class _LLState(GrammarState):
    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, run_tokens: RunTokens | None):
        self._matcher = matcher
        self._tokens = vocabulary.tokens
        self._run_tokens = run_tokens
        self._runs = None if run_tokens is None else JsonRuns()
        bits = len(vocabulary.tokens) + (not vocabulary.eos_ids)
        self._words = -(-bits // 32)

    def fill_mask(self, row: np.ndarray) -> None:
        """See `GrammarState`."""
        whole = row if len(row) == self._words else np.zeros(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
        if self._matcher.is_error():
            message = _short(self._matcher.get_error())
            if "NoExtension" in message:
                raise RequestError("no text has this form", _FIELD)
            raise RequestError(f"{_TOO_HARD}: {message}", _FIELD)
        if whole is not row:
            row[:] = whole[: len(row)]
        if self._runs is not None and self._run_tokens is not None:
            self._runs.restrict(row, self._run_tokens)

    def accept(self, tokens: Sequence[int]) -> int:
        """See `GrammarState`."""
        count = self._matcher.try_consume_tokens(list(tokens))
        if count < len(tokens) and self._matcher.is_error():  # not of the token, which would be no error
            raise RequestError(f"{_TOO_HARD}: {_short(self._matcher.get_error())}", _FIELD)
        if self._runs is not None:
            for token in tokens[:count]:
                self._runs.accept(self._tokens[token])
        return count

    def rollback(self, count: int) -> None:
        """See `GrammarState`."""
        if count and not self._matcher.rollback(count):
            message = _short(self._matcher.get_error())
            raise RequestError(f"cannot go back by {count} tokens: {message}", _FIELD)
        if self._runs is not None:
            self._runs.rollback(count)

    @property
    def is_terminated(self) -> bool:
        """See `GrammarState`."""
        return self._matcher.is_stopped()


def _source(params: StructuredOutputsParams) -> str:
    """A form in the library's own language."""
    kind, text = params.kind, params.text
    if kind in ("json", "json_object"):
        options: dict[str, Any] = {
            "whitespace_flexible": not params.disable_any_whitespace,
            "lenient": False,
            "coerce_one_of": False,
        }
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        schema = {"type": "object"} if kind == "json_object" else prepare_schema(json.loads(text))
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return grammar_from("choice", text)
    if kind == "grammar":
        return grammar_from("grammar", text)
    return LLMatcher.grammar_from_lark(structural_tags(json.loads(text)))


def _short(message: str) -> str:
    """The library's message on one line, without the parser's state that may follow."""
    line = " ".join(message.split("<state>")[0].replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."


def _refusal(kind: str, message: str) -> RequestError:
    return RequestError(f"{_FIELD}.{kind} cannot be followed: {_short(message)}", _FIELD)
