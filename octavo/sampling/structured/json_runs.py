"""Bounds on what JSON's grammar leaves endless: white space between tokens, and the digits of a number.

A model that has lost its way writes blank lines or digits until its limit. Between tokens and within
numbers a run may grow to `MAX_RUN` characters; then no token may go on with it, where another one may
come instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_RUN = 64

_DIGITS = frozenset(b"0123456789")
_SPACES = frozenset(b" \t\r\n")
_NONE, _DIGIT, _SPACE = range(3)


class RunTokens:
    """The masks (int32 `[words]`) of tokens that begin with a digit, and with white space."""

    def __init__(self, tokens: Sequence[bytes], num_words: int):
        self.digit = _pack([bool(t) and t[0] in _DIGITS for t in tokens], num_words)
        self.space = _pack([bool(t) and t[0] in _SPACES for t in tokens], num_words)


def _pack(bits: list[bool], num_words: int) -> np.ndarray:
    padded = np.zeros(num_words * 32, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)


class JsonRuns:
    """Follows the bytes of one JSON text: whether they are in a string, and how long the last run is."""

    def __init__(self) -> None:
        # After each token: whether in a string, whether behind a backslash, the run's kind and length.
        self._states = [(False, False, _NONE, 0)]

    def accept(self, token: bytes) -> None:
        """Go on by a token's bytes."""
        quoted, escaped, kind, length = self._states[-1]
        for byte in token:
            if quoted:
                if escaped:
                    escaped = False
                elif byte == 0x5C:
                    escaped = True
                elif byte == 0x22:
                    quoted = False
                kind, length = _NONE, 0
                continue
            new = _DIGIT if byte in _DIGITS else _SPACE if byte in _SPACES else _NONE
            length = length + 1 if new == kind else 1
            kind = new
            quoted = byte == 0x22
        self._states.append((quoted, escaped, kind, length))

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        del self._states[len(self._states) - count :]

    def restrict(self, row: np.ndarray, tokens: RunTokens) -> None:
        """Take from a mask what would prolong a run that is long enough."""
        _, _, kind, length = self._states[-1]
        if kind == _NONE or length < MAX_RUN:
            return
        rest = row & ~(tokens.digit if kind == _DIGIT else tokens.space)
        if rest.any():
            row[:] = rest
