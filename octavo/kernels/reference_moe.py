"""Plain PyTorch twins of the mixture-of-experts kernels: what each one means, and the oracle of its tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from octavo.kernels.reference import silu_and_mul

Linear = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def route(
    logits: torch.Tensor,
    top_k: int,
    sigmoid: bool = False,
    renormalize: bool = True,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    sum_top2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row and their weights, as Transformers' Mixtral, Qwen and DeepSeek routers choose.

    Args:
        logits: `[rows, num_experts]`; computed on in float32.
        top_k: experts of a row.
        sigmoid: scores are the sigmoid of each logit, not the softmax over all.
        renormalize: divide the chosen scores by their sum.
        scale: factor of the weights.
        bias: float32 `[num_experts]`, added to the scores for the choice alone (arXiv 2408.15664).
        num_groups, top_groups: consecutive experts form `num_groups` groups of equal size; the choice is
            among the `top_groups` best of them (arXiv 2405.04434, section 2.1.4).
        sum_top2: a group is judged by the sum of its two best scores, not by the best.

    Returns:
        weights float32 `[rows, top_k]`, experts int32 `[rows, top_k]`, the best first.
    """
    scores = logits.float().sigmoid() if sigmoid else torch.softmax(logits, dim=-1, dtype=torch.float32)
    choice = scores if bias is None else scores + bias
    if top_groups < num_groups:
        grouped = choice.unflatten(-1, (num_groups, -1))
        judged = grouped.topk(2, dim=-1).values.sum(-1) if sum_top2 else grouped.amax(-1)
        allowed = torch.zeros_like(judged, dtype=torch.bool)
        allowed.scatter_(1, judged.topk(top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts.int()


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """Each row's weighted sum of its experts' SwiGLU feed-forwards: `sum_k weight_k * W2_k act(W13_k x)`.

    Reads only the matrices of experts that some row chose. What a row chose beyond the experts that there are
    (those of another rank) adds nothing. Waits for the device.

    Args:
        x: `[rows, hidden]`.
        w13: `[num_experts, 2 * inner, hidden]`, gate's rows, then up's.
        w2: `[num_experts, hidden, inner]`.
        weights: float32 `[rows, top_k]`.
        chosen: int32 `[rows, top_k]`; `num_experts`: none that is here.
        linear: the product with one expert's matrix.

    Returns:
        `[rows, hidden]` of `x`'s dtype; each expert's result is rounded to it, sums are float32.
    """
    top_k = chosen.shape[1]
    flat = chosen.flatten()
    out = torch.zeros(flat.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    for expert in flat.unique().tolist():
        if expert == len(w13):
            continue
        pairs = (flat == expert).nonzero()[:, 0]
        inner = silu_and_mul(linear(x[pairs // top_k], w13[expert], None))
        out[pairs] = (linear(inner, w2[expert], None) * weights.flatten()[pairs, None]).to(x.dtype)
    return out.unflatten(0, (-1, top_k)).float().sum(1).to(x.dtype)
