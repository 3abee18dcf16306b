"""One request's way through its grammar, and the mask of its next token."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from octavo.errors import RequestError
from octavo.sampling.structured.backend import Grammar

# A mask that takes longer (seconds of its thread's own time) makes its request one that waits its turn
# outside the batch, so that the others don't wait for it; one that takes less brings it back.
_SLOW, _FAST = 1e-3, 3e-4


class GrammarRun:
    """Owns the state of one request in its grammar, and the newest mask.

    The state has accepted exactly the output tokens that are known, wherever the request is: preemption
    drops tokens in flight, which the state has not seen.

    Attributes:
        mask: int32 `[words]`; that of the next token once `wait` has returned.
        pending: tokens that are being sampled.
        slow: whether masks are made apart, the request being left out of steps meanwhile.
        error: why it cannot go on.
    """

    def __init__(self, grammar: Grammar, pool: ThreadPoolExecutor):
        self._state = grammar.new_state()
        self._pool = pool
        self._fresh = True
        self._making: Future[None] | None = None
        self.mask = grammar.first_mask
        self.pending = 0
        self.slow = False
        self.error: str | None = None

    def accept(self, token: int) -> bool:
        """Go on by a token that was sampled; whether the grammar allows it (`error` says why not)."""
        self._join()
        self.pending = max(0, self.pending - 1)
        if self.error is None and self._state.accept([token]) != 1:
            self.error = (
                f"no token that structured_outputs allows was left by the other settings (token {token} was "
                "drawn): loosen allowed_token_ids, bad_words, logit_bias or min_tokens"
            )
        if self.error is not None:
            return False
        self._fresh = False
        if self.slow and not self._state.is_terminated:
            self.begin()
        return True

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete."""
        return self._state.is_terminated

    @property
    def is_ready(self) -> bool:
        """Whether the next token can be sampled without waiting for the mask."""
        return self.pending == 0 and (self._fresh or (self._making is not None and self._making.done()))

    def begin(self) -> None:
        """Start to make the mask on another thread, if it isn't there or being made."""
        if not self._fresh and self._making is None:
            self._making = self._pool.submit(self._make)

    def wait(self) -> None:
        """Return when the mask is there."""
        self._join()
        if not self._fresh:
            self._make()

    def _join(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            making.result()

    def _make(self) -> None:
        begin = time.thread_time()
        mask = np.zeros(len(self.mask), np.int32)
        try:
            if not self._state.is_terminated:  # nothing follows, and nobody reads the mask
                self._state.fill_mask(mask)
        except RequestError as error:
            self.error = str(error)
        if self.error is not None:
            mask.fill(-1)
        seconds = time.thread_time() - begin
        self.slow = seconds > (_FAST if self.slow else _SLOW)
        self.mask, self._fresh = mask, True
