"""How sure a draft is of its tokens, followed on the device, and where that ends it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels import ops
from octavo.sampling.processors import upload


@dataclass
class Drafted:
    """What became of an order with thresholds, on the device.

    Attributes:
        requests: int64 `[m]` on the host, which of the plan's requests were drafted for.
        made: int32 `[m]`, drafts of each that count.
        products: float32 `[m, k]`, of each draft's probability and those before it; 0 for those that
            were not drafted.
    """

    requests: np.ndarray
    made: torch.Tensor
    products: torch.Tensor


class Confidence:
    """Multiplies the probabilities that a draft gives its tokens, request by request; a draft ends before the
    token with which the product falls below one threshold, and behind a token with which it falls below the
    other.

    The probability is that of the draft's own distribution, before penalties, temperature and filters.
    """

    def __init__(self, num_requests: int, most: int, thresholds: tuple[float, float], device: torch.device):
        """`thresholds`: as `DraftOrder.thresholds`."""
        self._least, self._going = thresholds
        self._open = torch.ones(num_requests, dtype=torch.bool, device=device)
        self._product = torch.ones(num_requests, device=device)
        self.made = torch.zeros(num_requests, dtype=torch.int32, device=device)
        self.products = torch.zeros(num_requests, most, device=device)

    def take(self, places: np.ndarray, column: int, logits: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
        """Take in the tokens that were drafted at place `column` of some requests' drafts.

        Args:
            places: int64 `[n]` on the host, which requests these are.
            logits: `[n, vocab]`, the draft's; tokens: int32 `[n]`, drawn from them.

        Returns:
            bool `[n]`, whether the draft may go on, as far as the host knows: on a device that runs beside it
            always.
        """
        index = upload(places, logits.device)
        wide = logits.float()
        chosen = wide.gather(1, tokens[:, None].long()) - ops.logsumexp(wide)
        product = self._product[index] * chosen[:, 0].exp()
        is_open = self._open[index]
        kept = is_open & (product >= self._least)
        going = kept & (product >= self._going)
        self._product[index], self._open[index] = product, going
        self.products[index, column] = torch.where(is_open, product, 0.0)
        self.made[index] += kept.int()
        return going.numpy() if logits.device.type == "cpu" else np.ones(len(places), bool)
