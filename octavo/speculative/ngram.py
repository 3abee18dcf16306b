"""Prompt look-up: the newest tokens stood in the text before, so what followed them may follow again.

Method: "Prompt Lookup Decoding" (A. Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import numpy as np

from octavo.speculative.proposer import NOTHING, HostProposer, Proposal


class NgramProposer(HostProposer):
    """Finds the longest ending of a text, of `shortest` to `longest` tokens, that occurs in it before.

    Where it occurs several times the newest is taken, of which the whole draft is known if there is one.
    Nothing is kept between calls. A sort of proposals is the length of what was found.
    """

    def __init__(self, shortest: int, longest: int):
        self._shortest, self._longest = shortest, longest
        self.num_kinds = longest - shortest + 1

    def propose(self, slot: int, tokens: np.ndarray, most: int) -> Proposal:
        """See `HostProposer`."""
        known = len(tokens)
        if known <= self._shortest:
            return NOTHING
        # Ends of earlier occurrences: each is followed by one token at least.
        ends = np.flatnonzero(tokens[: known - 1] == tokens[known - 1])
        length, found = 1, ends
        while len(ends):
            if length >= self._shortest:
                found = ends
            if length == self._longest:
                break
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[known - 1 - length]]
            if len(ends):
                length += 1
        if length < self._shortest or not len(found):
            return NOTHING
        whole = np.searchsorted(
            found, known - most, side="left"
        )  # ends before have `most` tokens behind them
        end = int(found[whole - 1] if whole else found[0])
        draft = tokens[end + 1 : end + 1 + most]
        return Proposal(draft.copy(), length - self._shortest)
