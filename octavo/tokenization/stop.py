"""Stop strings in a growing text: found at once, never shown in part."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from octavo.sampling_params import SamplingParams
from octavo.tokenization.incremental import IncrementalDetokenizer
from octavo.tokenization.tokenizer import Tokenizer

_CACHED_LENGTH = 1024


class _Automaton:
    """Aho and Corasick's automaton (1975) over characters: one step a character, any number of stops.

    Attributes:
        goto: per state, the next state by character.
        fail: per state, the state of its longest proper suffix that is one.
        found: per state, the longest stop string that ends there (it starts earliest), or None.
        hold: per state, how many trailing characters could be the start of a longer stop string.
        first: finds a character that begins a stop string.
    """

    def __init__(self, stops: Sequence[str]):
        self.goto: list[dict[str, int]] = [{}]
        self.found: list[str | None] = [None]
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                following = self.goto[state].get(char)
                if following is None:
                    following = self.goto[state][char] = len(self.goto)
                    self.goto.append({})
                    self.found.append(None)
                    depth.append(depth[state] + 1)
                state = following
            self.found[state] = stop
        self.fail = [0] * len(self.goto)
        self.hold = [0] * len(self.goto)
        queue = list(self.goto[0].values())
        for state in queue:  # grows while it is read: breadth first
            fail = self.fail[state]
            self.found[state] = self.found[state] or self.found[fail]
            self.hold[state] = depth[state] if self.goto[state] else self.hold[fail]
            for char, following in self.goto[state].items():
                self.fail[following] = self.step(fail, char)
                queue.append(following)
        self.first = re.compile("[" + "".join(map(re.escape, self.goto[0])) + "]")

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        goto, fail = self.goto, self.fail
        while (following := goto[state].get(char)) is None:
            if not state:
                return 0
            state = fail[state]
        return following


@lru_cache(maxsize=64)
def _cached(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


# Those that are in use: a request has one, however many choices it has.
_in_use: weakref.WeakValueDictionary[tuple[str, ...], _Automaton] = weakref.WeakValueDictionary()


def _automaton(stops: Sequence[str]) -> _Automaton:
    key = tuple(stops)
    # Long ones would fill the cache with megabytes, and are rare.
    if sum(map(len, stops)) <= _CACHED_LENGTH:
        return _cached(key)
    found = _in_use.get(key)
    if found is None:
        found = _in_use[key] = _Automaton(stops)
    return found


class Match(NamedTuple):
    """A completed stop string, and the characters of the last `feed` up to its end."""

    stop: str
    end: int


class StopMatcher:
    """Looks for stop strings in text that comes in pieces, however it is cut.

    The stop string that is completed first wins; of those completed by the same character, the one
    that starts first. Until the end, text that may still turn out to begin one is held back, and no
    more than that.

    Args:
        stops: non-empty strings, at least one.
        include: whether the stop string itself is part of the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._automaton = _automaton(stops)
        self._include = include
        self._state = 0
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, Match | None]:
        """Add text; what can be shown of it and of what was held, and the stop string that ends it.

        `armed=False`: stop strings that are completed by this text do not count.
        """
        automaton, state, position = self._automaton, self._state, 0
        length = len(text)
        while position < length:
            if not state:
                begin = automaton.first.search(text, position)
                if begin is None:
                    break
                position = begin.start()
            state = automaton.step(state, text[position])
            position += 1
            stop = automaton.found[state]
            if stop is not None and armed:
                whole = self._held + text[:position]
                self._held = ""
                return whole if self._include else whole[: len(whole) - len(stop)], Match(stop, position)
        self._state = state
        whole = self._held + text if self._held else text
        # An included stop string is shown anyway, so its beginning may be.
        hold = 0 if self._include else automaton.hold[state]
        if not hold:
            self._held = ""
            return whole, None
        self._held = whole[-hold:]
        return whole[:-hold], None

    def flush(self) -> str:
        """No text follows: what was held back."""
        held, self._held = self._held, ""
        return held


class Delta(NamedTuple):
    """What a push adds to a choice.

    Attributes:
        text: to be shown now.
        stop: the stop string that ended the text, or None.
        num_tokens_used: how many of the pushed tokens belong to the choice (all, unless it stopped).
    """

    text: str
    stop: str | None
    num_tokens_used: int


class TextStream:
    """The text of one choice with its stop strings: detokenization, then matching.

    The deltas' texts add up to the same string however the tokens are grouped into pushes. A stop
    string does not count before `params.min_tokens` tokens are complete: one that is completed by
    one of them is ordinary text. Without `params.detokenize` every text is empty.

    Args:
        tokenizer: None only without `params.detokenize`.
        prompt_ids: stop strings in the prompt do not count; it is only context.
        params: stop, include_stop_str_in_output, min_tokens, skip_special_tokens, detokenize.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: SamplingParams):
        self._include = params.include_stop_str_in_output
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, prompt_ids, params)
            if params.detokenize and tokenizer is not None
            else None
        )
        self._matcher = StopMatcher(params.stop, self._include) if params.stop and self._detokenizer else None
        self._min_tokens = params.min_tokens
        self._seen = 0
        self._stop: str | None = None
        self._parts: list[str] = []

    def push(self, ids: Sequence[int], finished: bool = False, ended_by_token: bool = False) -> Delta:
        """Add tokens.

        Args:
            ids: new tokens, in order; may be empty.
            finished: no token follows (whatever the reason): text that is held back is given out.
            ended_by_token: the last id ended the text as EOS or one of `stop_token_ids`; it belongs to
                the choice, but its text is left out unless `include_stop_str_in_output`.
        """
        if self._stop is not None:
            return Delta("", self._stop, 0)
        if self._detokenizer is None:
            return Delta("", None, len(ids))
        shown = ids[:-1] if ended_by_token and not self._include else ids
        if self._matcher is None:
            text = self._detokenizer.append(shown) if shown else ""
            if finished:
                text += self._detokenizer.finish()
            return self._delta(text, None, len(ids))
        unarmed, text = 0, ""
        if self._seen < self._min_tokens:
            unarmed = min(self._min_tokens - self._seen, len(shown))
            text = self._matcher.feed(self._detokenizer.append(shown[:unarmed]), armed=False)[0]
            shown = shown[unarmed:]
        self._seen += unarmed + len(shown)
        if shown:
            mark = self._detokenizer.mark()
            new, match = self._matcher.feed(self._detokenizer.append(shown))
            text += new
            if match is not None:
                used = unarmed + self._detokenizer.tokens_for(mark, shown, match.end)
                return self._delta(text, match.stop, used)
        if finished:
            new, match = self._matcher.feed(self._detokenizer.finish(), armed=self._seen > self._min_tokens)
            text += new
            if match is not None:
                return self._delta(text, match.stop, len(ids))
            text += self._matcher.flush()
        return self._delta(text, None, len(ids))

    def lengthen(self, ids: list[int]) -> str:
        """`push` of tokens that end nothing, without stop strings: the text that they add."""
        assert self._matcher is None
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.append(ids)
        if text:
            self._parts.append(text)
        return text

    def _delta(self, text: str, stop: str | None, used: int) -> Delta:
        self._stop = stop
        if text:
            self._parts.append(text)
        return Delta(text, stop, used)

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""
