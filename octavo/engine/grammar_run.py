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
        masks: int32 `[1 + drafts, words]`; those of the next token and of the tokens after each draft, once
            `wait` has returned.
        drafts: tokens that are judged with the next one; the grammar allows them all.
        pending: steps whose tokens are being sampled.
        slow: whether masks are made apart, the request being left out of steps meanwhile.
        error: why it cannot go on.
    """

    def __init__(self, grammar: Grammar, pool: ThreadPoolExecutor):
        self._state = grammar.new_state()
        self._pool = pool
        self._fresh = True
        self._making: Future[None] | None = None
        self.masks = grammar.first_mask[None]
        self.drafts: list[int] = []
        self._made_for: list[int] = []
        self.pending = 0
        self.slow = False
        self.error: str | None = None

    def accept(self, token: int) -> bool:
        """Go on by a token that was sampled; whether the grammar allows it (`error` says why not)."""
        self._join()
        self.pending = max(0, self.pending - 1)
        if self.error is None and self._accept([token]) != 1 and self.error is None:
            self.error = (
                f"no token that structured_outputs allows was left by the other settings (token {token} was "
                "drawn): loosen allowed_token_ids, bad_words, logit_bias or min_tokens"
            )
        if self.error is not None:
            return False
        self._fresh, self.drafts = False, []
        if self.slow and not self._state.is_terminated:
            self.begin()
        return True

    def allowed(self, tokens: list[int]) -> int:
        """How many of these tokens, from the first, may follow what is known."""
        self._join()
        if self.error is not None:
            return 0
        count = self._accept(tokens)
        if self.error is not None:
            return 0
        self._state.rollback(count)
        return count

    def _accept(self, tokens: list[int]) -> int:
        """How many of them are allowed, which the state has taken in; `error` says where it cannot tell."""
        try:
            return self._state.accept(tokens)
        except RequestError as error:
            self.error = str(error)
            return 0

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete."""
        return self._state.is_terminated

    @property
    def is_awaited(self) -> bool:
        """Whether a step, or a mask that is being made, has to be waited for before the next token. (A mask
        that nobody makes is made when its step is: one that turned out to be quick is not begun before.)"""
        return self.pending > 0 or (self._making is not None and not self._making.done())

    def begin(self) -> None:
        """Start to make the masks on another thread, if they aren't there or being made."""
        self._check_drafts()
        if not self._fresh and self._making is None:
            self._making = self._pool.submit(self._make)

    def wait(self) -> None:
        """Return when the masks are there."""
        self._join()
        self._check_drafts()
        if not self._fresh:
            self._make()

    def _check_drafts(self) -> None:
        """Masks that were made for other drafts are void."""
        if self._fresh and self._made_for != self.drafts:
            self._fresh = False

    def _join(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            making.result()

    def _make(self) -> None:
        begin = time.thread_time()
        drafts = self.drafts
        masks = np.zeros((1 + len(drafts), self.masks.shape[1]), np.int32)
        try:
            self._fill(masks, drafts)
        except RequestError as error:
            self.error = str(error)
        if self.error is not None:
            masks.fill(-1)
        seconds = (time.thread_time() - begin) / len(masks)
        self.slow = seconds > (_FAST if self.slow else _SLOW)
        self.masks, self._made_for, self._fresh = masks, drafts, True

    def _fill(self, masks: np.ndarray, drafts: list[int]) -> None:
        """The state is afterwards what it was before, unless it fails."""
        gone = 0
        for i, row in enumerate(masks):
            if self._state.is_terminated:  # nothing follows, and nobody reads the masks
                masks[i:].fill(-1)
                break
            self._state.fill_mask(row)
            if i < len(drafts):
                if self._state.accept([drafts[i]]) != 1:
                    masks[i + 1 :].fill(-1)
                    break
                gone += 1
        self._state.rollback(gone)
