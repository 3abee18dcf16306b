"""Suffix decoding: what followed the newest tokens most often, in a request's own text or in earlier outputs.

Method: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (Oliaro et al., 2024),
arXiv 2411.04975. Where the paper keeps suffix trees, the tokens themselves are kept here and searched: a
request's own text by comparing, which needs nothing prepared, and earlier outputs by an index (`Outputs`).
"""

from __future__ import annotations

import numpy as np

from octavo.speculative.continuation import (
    NO_DRAFT,
    UNKNOWN,
    Draft,
    likeliest,
)
from octavo.speculative.outputs import Outputs
from octavo.speculative.proposer import NOTHING, HostProposer, Proposal
from octavo.speculative_config import MOST_DRAFTS

MAX_TOKENS = 1 << 21  # of earlier outputs
_SCREENED = 1024  # places in a request's own text that are sorted out token by token
_SCREENS = 4
_PLACES = 32  # places that are looked at closely
_BEYOND = -2  # where there is no token to look for
_MATCHES = np.array([1, 2, 3, 5, 9, 17])  # kinds of proposals: from so many tokens that were found again
_ODDS = np.array([0.0, 0.4, 0.7, 0.95])  # and from such a mean probability


class SuffixProposer(HostProposer):
    """Drafts the likeliest continuation of the longest ending that occurs before.

    Of the draft from the request's own text, and that from earlier outputs, the one is proposed of which more
    tokens are expected to stand. Where an ending occurs often, the newest places count.
    """

    num_kinds = len(_MATCHES) * len(_ODDS)

    def __init__(self, depth: int, factor: float, least: float, outputs: Outputs, places: int = _PLACES):
        """
        Args:
            depth: tokens that are looked for, at most.
            factor: most tokens of a draft for each one that was found again.
            least: probability below which a draft ends.
            outputs: of earlier requests; this adds to them.
            places: that count, at most.
        """
        self._depth, self._factor, self._least, self._places = depth, factor, least, places
        self._outputs = outputs
        self._span = np.arange(-depth, MOST_DRAFTS + 1)  # around the place where a run ends
        self._ending = np.empty(depth + 1, np.int32)

    def leave(self, slot: int, tokens: np.ndarray, prompt_len: int, lasting: bool) -> None:
        """See `HostProposer`."""
        if lasting:
            self._outputs.add(tokens[prompt_len:])

    def propose(self, slot: int, tokens: np.ndarray, most: int) -> Proposal:
        """See `HostProposer`."""
        if not len(tokens):
            return NOTHING
        self._outputs.index()
        ending = self._ending
        count = min(self._depth, len(tokens))
        ending[:count] = tokens[: -count - 1 : -1]
        ending[count:] = _BEYOND
        best = self._from_own(tokens, most)
        other = self._from_outputs(count, most, best.score)
        if other.score > best.score:
            best = other
        count = len(best.tokens)
        if not count:
            return NOTHING
        match = int(_MATCHES.searchsorted(best.matched, side="right")) - 1
        odds = int(_ODDS.searchsorted(best.score / count, side="right")) - 1
        return Proposal(best.tokens, match * len(_ODDS) + odds)

    def _from_own(self, tokens: np.ndarray, most: int) -> Draft:
        newest = len(tokens) - 1
        ends = (tokens[:newest] == self._ending[0]).nonzero()[0]
        if len(ends) > self._places:
            ends = self._screen(tokens, ends)
        if not len(ends):
            return NO_DRAFT
        places = ends[:, None] + self._span[: self._depth + 1 + most]
        around = tokens.take(places, mode="clip")
        if places.item(0) < 0:
            around[places < 0] = UNKNOWN
        if places.item(-1) > newest:
            around[places > newest] = UNKNOWN
        return self._draft(around, most, 1)

    def _screen(self, tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Of many places, the newest of those at which most of the newest tokens stand."""
        ends = ends[-max(_SCREENED, self._places) :]
        for length in range(1, min(_SCREENS, self._depth)):
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not len(longer):
                break
            ends = longer
            if len(ends) <= self._places:
                break
        return ends[-self._places :]

    def _from_outputs(self, known: int, most: int, better_than: float) -> Draft:
        """The draft from earlier outputs; there need be none if its score can't be better.

        Args:
            known: tokens of the ending.
        """
        if min(most, int(self._factor * known)) <= better_than:
            return NO_DRAFT
        store = self._outputs.tokens
        for run, found in self._outputs.find(self._ending[:known].tolist(), self._places):
            if self._factor * (2 * run - 1) <= better_than and 2 * run <= self._outputs.longest_run:
                break  # of twice as many tokens there is none
            places = np.array(found)[:, None] + self._span[: self._depth + 1 + most]
            draft = self._draft(store.take(places, mode="wrap"), most, min(run, known))
            if draft.matched:
                return draft
        return NO_DRAFT

    def _draft(self, around: np.ndarray, most: int, shortest: int) -> Draft:
        """From tokens around the places where a run ends, int32 `[n, depth + 1 + most]`.

        Args:
            shortest: fewer tokens than that are another run, with the same hash.
        """
        depth = self._depth
        # The last column never agrees, so that there is a first one that doesn't.
        lengths = (around[:, depth::-1] == self._ending).argmin(axis=1)
        lengths[around[:, depth + 1] == UNKNOWN] = 0
        matched = int(lengths.max())
        length = min(most, int(self._factor * matched))
        if matched < shortest or not length:
            return NO_DRAFT
        if len(around) > 1:
            around = around[lengths == matched]
        rows = around[:, depth + 1 : depth + 1 + length]
        unknown = rows == UNKNOWN
        if unknown.any():  # behind the end of a text is another one
            rows[np.logical_or.accumulate(unknown, axis=1)] = UNKNOWN
        return Draft(*likeliest(rows, self._least), matched)
