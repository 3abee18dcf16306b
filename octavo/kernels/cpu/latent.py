"""The C++ kernels of latent attention as functions of tensors; twins of `octavo.kernels.reference_latent`.

What `octavo.kernels.cpu.ops` says of its functions holds here too.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.ops import AttentionBatch, attention_batch, differ, dtype_code, library


class LatentShape(ctypes.Structure):
    """One layer's constants, `LatentShape` in latent.cpp; made by `latent_shape`."""

    _fields_ = [
        ("heads", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("rope", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("cache_dtype", ctypes.c_int32),
    ]


def latent_problem(rank: int, rope_dim: int, block_size: int) -> str | None:
    """Why the kernels cannot take this shape, or None."""
    if rank % 4 or block_size % 4 or rope_dim % 2:
        return (
            f"kv_rank {rank} and block_size {block_size} must be multiples of 4, and rope_dim {rope_dim} of 2"
        )
    return None


def latent_shape(
    heads: int, rank: int, cache: torch.Tensor, scale: float, activations: torch.Tensor
) -> LatentShape:
    """A layer's constants, for a cache `[num_blocks, 1, 1, block_size, rank + rope_dim]` and activations of
    the dtype of `activations`. Raises ValueError for a shape that the kernels cannot take."""
    _, parts, kv_heads, block_size, size = cache.shape
    if (parts, kv_heads) != (1, 1) or not cache.is_contiguous():
        raise ValueError(
            f"cache must be contiguous [blocks, 1, 1, block_size, {rank} + rope], got {cache.shape}"
        )
    if (problem := latent_problem(rank, size - rank, block_size)) is not None:
        raise ValueError(problem)
    return LatentShape(
        heads, rank, size - rank, block_size, scale, dtype_code(activations), dtype_code(cache)
    )


def attend(
    shape: LatentShape, batch: AttentionBatch, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor
) -> None:
    """`latent_attention` with prepared constants: what a layer calls each step. Checks no shapes."""
    status = library().octavo_latent_attention(
        ctypes.addressof(shape), ctypes.addressof(batch), q.data_ptr(), cache.data_ptr(), out.data_ptr()
    )
    if status:
        raise RuntimeError(f"latent attention refused its arguments (status {status})")


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
    """See the twin; `q` and `out` are contiguous."""
    if out.dtype is not q.dtype:
        raise differ(q, out)
    if not (q.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"q and out must be contiguous, got strides {q.stride()} and {out.stride()}")
    shape = latent_shape(q.shape[1], rank, cache, scale, q)
    attend(shape, attention_batch(query_start, seq_lens, block_table), q, cache, out)
    return out


def write(
    shape: LatentShape,
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
    """`rotate_and_write_latent` with prepared constants. Checks no shapes."""
    library().octavo_latent_write(
        ctypes.addressof(shape),
        q_pe.data_ptr(),
        q_pe.stride(0),
        q_pe.stride(1),
        q_out.data_ptr(),
        q_out.stride(0),
        q_out.stride(1),
        kv.data_ptr(),
        kv.stride(0),
        weight.data_ptr(),
        eps,
        cos_sin.data_ptr(),
        positions.data_ptr(),
        cache.data_ptr(),
        slot_mapping.data_ptr(),
        q_pe.shape[0],
        torch.get_num_threads(),
    )


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
    """See the twin; all are contiguous in their last dimension."""
    if not q_pe.dtype is q_out.dtype is kv.dtype is weight.dtype:
        raise differ(q_pe, q_out, kv, weight)
    if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous():
        raise TypeError(f"cos_sin must be contiguous float32, got {cos_sin.dtype}")
    for name, x in (("positions", positions), ("slot_mapping", slot_mapping)):
        if x.dtype is not torch.int64 or not x.is_contiguous():
            raise TypeError(f"{name} must be contiguous int64, got {x.dtype}")
    if q_pe.stride(-1) != 1 or q_out.stride(-1) != 1 or kv.stride(-1) != 1:
        raise ValueError("q_pe, q_out and kv must be contiguous in their last dimension")
    shape = latent_shape(q_pe.shape[1], weight.shape[0], cache, 1.0, q_pe)
    write(shape, q_pe, q_out, kv, weight, eps, cos_sin, positions, cache, slot_mapping)
