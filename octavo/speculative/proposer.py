"""What every speculative method implements: proposing tokens, which the verifier then judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class ProposeContext:
    """The requests to draft for, after a step's tokens are known.

    Attributes:
        slots: int32 `[n]` on the host, rows of the token table.
        slots_device: the same on the device.
        num_known: int32 `[n]` on the device, known tokens of each.
        token_table: int32 `[slots, max_model_len]` on the device.
        hidden: `[n, hidden_size]`, the last hidden state of each request, for methods that ask
            (`needs_hidden`).
    """

    slots: np.ndarray
    slots_device: torch.Tensor
    num_known: torch.Tensor
    token_table: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass
class Drafts:
    """Proposed continuations.

    Attributes:
        tokens: int32 `[n, k]` on the device; entries past a request's count are arbitrary.
        counts: int32 `[n]` on the host, 0 <= counts <= k.
    """

    tokens: torch.Tensor
    counts: np.ndarray


class Proposer(ABC):
    """Proposes up to `max_drafts` tokens per request. It cannot change what is generated, only how fast."""

    max_drafts: int
    needs_hidden: bool = False

    @abstractmethod
    def propose(self, context: ProposeContext) -> Drafts | None:
        """Drafts to verify in the next step; None: none for anybody."""


class NoProposer(Proposer):
    """Plain decoding: proposes nothing."""

    max_drafts = 0

    def propose(self, context: ProposeContext) -> Drafts | None:
        """None."""
        return None
