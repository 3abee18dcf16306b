"""Figures of single positions from logits over the whole vocabulary, in float64."""

from __future__ import annotations

import numpy as np
import torch

from octavo.kernels import ops

TOP = 5


def score(
    logits: torch.Tensor, targets: torch.Tensor, baseline: torch.Tensor | None = None
) -> dict[str, np.ndarray]:
    """How likely a model finds the tokens that follow, and how far it is from a baseline.

    The divergence is Kullback and Leibler's of the model from the baseline,
    sum over the vocabulary of p_baseline (ln p_baseline - ln p_model), in nats.

    Args:
        logits: `[rows, vocab]`, any float type.
        targets: integers `[rows]` on the same device, the token that follows each row.
        baseline: `[rows, vocab]`, any float type and device.

    Returns:
        float64 `[rows]` each: `nll`, the negative log-likelihood of the targets; with a baseline also its
        `baseline_nll`, `kl`, `top1` (1 where both find the same token likeliest; of equals the lowest id,
        as greedy decoding) and `top5` (share of the 5 likeliest that they have in common).
    """
    targets = targets.long()[:, None]
    ours = torch.log_softmax(logits.double(), -1)
    found = {"nll": -ours.gather(1, targets)[:, 0]}
    if baseline is not None:
        baseline = baseline.to(logits.device)
        theirs = torch.log_softmax(baseline.double(), -1)
        found["baseline_nll"] = -theirs.gather(1, targets)[:, 0]
        found["kl"] = _divergence(theirs, ours)
        found["top1"] = (ops.argmax(logits) == ops.argmax(baseline)).double()
        k = min(TOP, logits.shape[1])
        pairs = logits.topk(k).indices[:, :, None] == baseline.topk(k).indices[:, None, :]
        found["top5"] = pairs.any(-1).double().mean(-1)
    return {name: values.cpu().numpy() for name, values in found.items()}


def _divergence(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Of log-probabilities `[rows, vocab]`, `[rows]`; `ours` is overwritten."""
    weights = theirs.exp()
    terms = torch.sub(theirs, ours, out=ours).mul_(weights)
    found = terms.sum(-1)
    if bool(found.isnan().any()):
        # A token that the baseline rules out adds nothing, whatever the model says of it.
        found = terms.masked_fill_(weights == 0, 0.0).sum(-1)
    return found.clamp_min(0.0)  # below zero by rounding alone
