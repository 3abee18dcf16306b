"""What every speculative method implements: proposing tokens, which the verifier then judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np


class Proposal(NamedTuple):
    """A continuation of one request's tokens.

    Attributes:
        tokens: int32 `[k]`, k >= 0.
        kind: which of the proposer's `num_kinds` sorts this is: acceptance is measured for each sort.
    """

    tokens: np.ndarray
    kind: int


NOTHING = Proposal(np.zeros(0, np.int32), 0)


class HostProposer(ABC):
    """Drafts on the host, from the tokens of requests alone; that changes how fast tokens come, never which.

    Attributes:
        num_kinds: sorts of proposals, by how likely they are to be right.
    """

    num_kinds: int = 1

    def enter(self, slot: int) -> None:  # noqa: B027 (most keep nothing of a request)
        """A request comes into a slot: what was known of the slot is void."""

    def leave(self, slot: int, tokens: np.ndarray, prompt_len: int, lasting: bool) -> None:  # noqa: B027
        """A request leaves its slot, with all its tokens (int32).

        Args:
            lasting: it has ended, and others may be drafted for from its output (it has no cache salt).
        """

    @abstractmethod
    def propose(self, slot: int, tokens: np.ndarray, most: int) -> Proposal:
        """Draft at most `most` tokens.

        Args:
            slot: where the request is; the same from `enter` to `leave`.
            tokens: int32 `[n]`, all its tokens; not to be kept.
            most: at least 1.
        """
