"""Plain PyTorch twins of the latent-attention kernels (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1).

One vector per token is cached: the normalized compressed KV (`rank` elements), then the rotated part of
the key that all heads share (`rope_dim` elements). In the absorbed form queries live in the same space, so
that attention is multi-query attention whose one key is the whole vector and whose value is its first
`rank` elements.
"""

from __future__ import annotations

import torch

from octavo.kernels.reference import rms_norm, rotary


def rotate_and_write_latent(
    q_pe: torch.Tensor,
    q_out: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotates the queries' rotary parts, and normalizes, rotates and stores the rows' latent vectors.

    Args:
        q_pe: `[rows, heads, rope_dim]`; may be a view.
        q_out: `[rows, heads, rope_dim]`, where the rotated `q_pe` goes; may be a view.
        kv: `[rows, rank + rope_dim]`: compressed KV before its norm, then the shared key's part.
        weight: `[rank]`, of the norm of the compressed KV.
        eps: added to the mean square.
        cos_sin: float32 `[max_position, rope_dim]`, cosines in the first half, then sines.
        positions: int64 `[rows]`.
        cache: `[num_blocks, 1, 1, block_size, rank + rope_dim]`.
        slot_mapping: int64 `[rows]`, `block * block_size + offset`; negative rows are not stored.
    """
    rank, block_size = weight.shape[0], cache.shape[3]
    key = kv[:, None, rank:].clone()
    turned = q_pe.clone()
    rotary(turned, key, cos_sin, positions)
    q_out.copy_(turned)
    latent = torch.cat((rms_norm(kv[:, :rank], weight, eps), key[:, 0]), dim=-1)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    cache[slots // block_size, 0, 0, slots % block_size] = latent[kept].to(cache.dtype)


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    rank: int,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of a ragged batch over a paged latent cache, in float32.

    Args:
        q: `[rows, heads, rank + rope_dim]`; request i's rows are the last of its context.
        cache: `[num_blocks, 1, 1, block_size, rank + rope_dim]`, already holding these rows' vectors.
        query_start: int32 `[n + 1]`, first row of each request.
        seq_lens: int32 `[n]`, context lengths.
        block_table: int32 `[n, max_blocks]`.
        rank: elements of a vector that are its value.
        scale: factor of the scores.
        out: `[rows, heads, rank]`; rows that no request owns are left alone.

    Returns:
        `out`.
    """
    starts, lens, block_size = query_start.tolist(), seq_lens.tolist(), cache.shape[3]
    for i, context in enumerate(lens):
        first, last = starts[i], starts[i + 1]
        if first == last:
            continue
        blocks = block_table[i, : -(-context // block_size)].long()
        kv = cache[blocks].float().flatten(0, 3)[:context]
        scores = torch.einsum("rhd,td->hrt", q[first:last].float(), kv) * scale
        row = torch.arange(context - (last - first), context, device=q.device)
        hidden = torch.arange(context, device=q.device) > row[:, None]
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hrt,td->rhd", probs, kv[:, :rank]).to(q.dtype)
    return out
