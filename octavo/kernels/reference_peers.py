"""Plain PyTorch twins of the sums over GPUs of one host (`octavo.kernels.triton.peers`): all ranks' parts in
one place, and what each of them gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.kernels import reference


def sum_over_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ranks' parts, `[rows, size]` each, added up in their order in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def sum_add_rms_norm(
    parts: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.add_rms_norm` of the sum: `residual` is overwritten."""
    return reference.add_rms_norm(sum_over_ranks(parts), residual, weight, eps)


def best_over_ranks(values: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """The index that goes with each row's largest value; of equals that of the first rank.

    Args:
        values: each rank's, float32 `[rows]`; indices: likewise, integers.
    """
    best = torch.stack(list(values)).argmax(0)  # of equals PyTorch's takes the first on a CPU
    return torch.stack(list(indices)).gather(0, best[None]).squeeze(0)
