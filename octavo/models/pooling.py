"""From the hidden states of a text's tokens to one vector (Sentence-BERT, arXiv 1908.10084)."""

from __future__ import annotations

import torch


class Pooler:
    """Pools requests whose rows arrive in chunks; owns what it has seen of each, by slot.

    Args:
        pooling_type: LAST, MEAN or CLS.
        slots: requests at most.
        hidden_size: of a token's vector.
        device: where the hidden states are.
    """

    def __init__(self, pooling_type: str, slots: int, hidden_size: int, device: torch.device):
        self.pooling_type = pooling_type
        kept = 0 if pooling_type == "LAST" else slots + 1
        self._state = torch.zeros(kept, hidden_size, dtype=torch.float32, device=device)

    def forget(self, slots: torch.Tensor) -> None:
        """New requests are in these slots, int64 `[n]`."""
        if self.pooling_type == "MEAN":
            self._state[slots] = 0

    def add(self, hidden: torch.Tensor, row_slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Take in a step's rows.

        Args:
            hidden: `[rows, hidden_size]`.
            row_slots: int64 `[rows]`, whose each row is.
            positions: int64 `[rows]`, of each token in its request.
        """
        if self.pooling_type == "MEAN":
            self._state.index_add_(0, row_slots, hidden.float())
        elif self.pooling_type == "CLS":
            first = positions == 0
            spare = len(self._state) - 1  # takes the rows that are no text's first
            self._state[torch.where(first, row_slots, spare)] = hidden.float()

    def take(
        self, hidden: torch.Tensor, last_rows: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Vectors of the requests that have all their rows, float32 `[n, hidden_size]`.

        Args:
            hidden: `[rows, hidden_size]` of this step.
            last_rows: int64 `[n]`, each request's last row in it.
            slots: int64 `[n]`.
            lengths: int64 `[n]`, tokens of each.
        """
        if self.pooling_type == "LAST":
            return hidden[last_rows].float()
        if self.pooling_type == "MEAN":
            return self._state[slots] / lengths[:, None]
        return self._state[slots]


def pool_padded(pooling_type: str, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Vectors of whole texts, float32 `[n, hidden_size]`.

    Args:
        pooling_type: LAST, MEAN or CLS.
        hidden: `[n, longest, hidden_size]`, each text from the left.
        lengths: int64 `[n]`, tokens of each; what lies behind them is padding.
    """
    if pooling_type == "CLS":
        return hidden[:, 0].float()
    if pooling_type == "LAST":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    kept = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return torch.where(kept[:, :, None], hidden.float(), 0.0).sum(1) / lengths[:, None]
