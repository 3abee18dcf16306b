"""Plain PyTorch twins of the kernels: what each one means, on any device, and the oracle of its tests.

All compute in float32 inside and round to the tensors' dtype where Transformers' Llama rounds, so
that in bfloat16 they agree with it, and in float32 to the last bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467).

    Args:
        x: `[..., size]`, float32, bfloat16 or float16; any strides.
        weight: `[size]`. Of `x`'s dtype, it multiplies the normalized row rounded to that dtype, as in
            Llama; float32, the row that is not rounded yet, as in Gemma.
        eps: added to the mean square.

    Returns:
        A new tensor of `x`'s shape and dtype.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype is x.dtype:
        return weight * normed.to(x.dtype)
    return (weight * normed).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a sublayer's output to the residual stream, in place, and normalizes the sum.

    Args:
        x: `[rows, size]`.
        residual: `[rows, size]`, overwritten with `x + residual` in its dtype.
        weight: `[size]`, as for `rms_norm`.
        eps: added to the mean square.

    Returns:
        The normalized sum (a new tensor) and `residual`.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension (arXiv 1607.06450).

    Args:
        x: `[rows, size]`, float32, bfloat16 or float16.
        weight: `[size]`, of `x`'s dtype or float32.
        bias: `[size]`, of the weight's dtype; None: 0.
        eps: added to the variance (the mean squared deviation).

    Returns:
        A new tensor of `x`'s shape and dtype, rounded once.
    """
    wide_bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), wide_bias, eps).to(x.dtype)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` of `x + residual`, which is written to `residual`; see `add_rms_norm`."""
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps), residual


def rotary(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotates `q` and `k` in place by their positions (RoPE, arXiv 2104.09864).

    Pairs are "neox" ones: dimension i turns with dimension `i + rotary_dim / 2`; dimensions from
    `rotary_dim` on are left alone.

    Args:
        q: `[rows, heads, head_dim]`; may be a view.
        k: `[rows, kv_heads, head_dim]`; may be a view.
        cos_sin: float32 `[max_position, rotary_dim]`, cosines in the first half, then sines.
        positions: int64 `[rows]`.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    for x in (q, k):
        low, high = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        x[..., : 2 * half] = turned.to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :n]) * x[..., n:]` (SwiGLU's gate, arXiv 2002.05202).

    Args:
        x: `[..., 2 n]`, the gate's half, then the other.

    Returns:
        `[..., n]`, same dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x[..., :n]) * x[..., n:]` with GELU's tanh form (arXiv 1606.08415; Gemma's GeGLU).

    Args:
        x: `[..., 2 n]`, the gate's half, then the other.

    Returns:
        `[..., n]`, same dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(x / cap)`, in place and in float32 inside (Gemma 2, arXiv 2408.00118).

    Args:
        x: `[rows, size]`, float32, bfloat16 or float16; rows may be any stride apart.
        cap: above 0.

    Returns:
        `x`.
    """
    return x.copy_((x.float() / cap).tanh_().mul_(cap))


def look_up_part(table: torch.Tensor, token_ids: torch.Tensor, first: int) -> torch.Tensor:
    """Vectors of tokens out of a part of an embedding's table; zeros of those that it does not have.

    Args:
        table: `[tokens, size]`, of the tokens from `first` on.
        token_ids: integers `[rows]`, contiguous.
        first: the table's first token.

    Returns:
        `[rows, size]`, a new tensor.
    """
    local = token_ids - first
    here = (local >= 0) & (local < len(table))
    return F.embedding(local.where(here, 0), table) * here.unsqueeze(-1)
