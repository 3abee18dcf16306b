"""The CPU kernels as functions of tensors: the library, rotary and cache, attention, sampling. Norms and
activations are in `norm_act`. Twins: `octavo.kernels.reference` and, for attention, the plain backend of
`octavo.layers.attention`.

All take float32 or bfloat16. The last dimension, and the heads of a row, must be contiguous; rows may
be any stride apart, so that slices of a fused q-k-v projection go in as they are. Nothing here is
differentiable. Call `available()` before anything else: where the library cannot be built it says so
once in the log, and the caller takes the plain twin.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading

import torch

from octavo.kernels.cpu import build

logger = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # `DType` in common.h
# `CacheType` in cached.h, by names of `KVFormat`; the last is int8 with offsets.
_CACHE_TYPES = {"float32": 0, "bfloat16": 1, "fp8": 2, "fp8_e5m2": 3, "int8": 4, "int8_offset": 5}
_BYTES_BEHIND = {"int8": 2, "int8_offset": 4}  # each token's codes
MAX_GROUP = 96  # query heads of one KV head that attention takes (MAX_LANES in attention.cpp)

_lib: ctypes.CDLL | None = None
_reason: str | None = None
_loading = threading.Lock()


class CacheShape(ctypes.Structure):
    """One layer's constants, `CacheShape` in cache.cpp; made by `cache_shape`."""

    _fields_ = [
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("rot_dim", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("cache_type", ctypes.c_int32),
    ]


class AttentionShape(ctypes.Structure):
    """One layer's constants, `AttentionShape` in attention.cpp; made by `attention_shape`."""

    _fields_ = [
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("cache_type", ctypes.c_int32),
    ]


class AttentionBatch(ctypes.Structure):
    """One step's batch, `AttentionBatch` in attention.h; made by `attention_batch`."""

    _fields_ = [
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("requests", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    ]


def available() -> bool:
    """Are the kernels there? The first call builds them if need be (some seconds, once per machine)
    and logs one line if they cannot be had."""
    global _lib, _reason
    if _lib is None and _reason is None:
        with _loading:
            if _lib is None and _reason is None:
                try:
                    if os.environ.get("OCTAVO_CPU_KERNELS") == "0":
                        raise build.BuildError("turned off by OCTAVO_CPU_KERNELS=0")
                    _lib = build.load()
                except build.BuildError as error:
                    _reason = str(error)
                    logger.warning("CPU kernels not available, plain PyTorch serves instead: %s", _reason)
    return _lib is not None


def load() -> None:
    """Makes sure that the kernels are there; raises RuntimeError with the reason if they are not."""
    library()


def why_not() -> str:
    """Why the kernels are not available, in one line; empty if they are."""
    return "" if available() else str(_reason)


def usable(x: torch.Tensor) -> bool:
    """Do the kernels take this tensor (on the CPU, float32 or bfloat16), and are they available?"""
    return x.dtype in _DTYPES and x.is_cpu and available()


def vector_width() -> int:
    """Floats in a vector of the built library: 16 (AVX-512), 8 (AVX2) or 4."""
    return int(library().octavo_vector_width())


def library() -> ctypes.CDLL:
    """The loaded library; raises RuntimeError with the reason if it cannot be had."""
    if _lib is None and not available():
        raise RuntimeError(f"CPU kernels not available: {_reason}")
    assert _lib is not None
    return _lib


def dtype_code(x: torch.Tensor) -> int:
    """The number of a tensor's dtype in C++."""
    code = _DTYPES.get(x.dtype)
    if code is None:
        raise TypeError(f"CPU kernels take float32 and bfloat16, got {x.dtype}")
    return code


def differ(*tensors: torch.Tensor) -> TypeError:
    """The error to raise for tensors whose dtypes should agree."""
    return TypeError(f"dtypes differ: {', '.join(str(x.dtype) for x in tensors)}")


def row_stride(x: torch.Tensor) -> int:
    """Elements between the rows of `[rows, size]` or `[rows, heads, size]`; all else is contiguous."""
    strides = x.stride()
    if strides[-1] != 1 or (len(strides) == 3 and strides[1] != x.shape[2] and x.shape[1] != 1):
        raise ValueError(f"rows must be contiguous inside, got strides {strides} of {tuple(x.shape)}")
    return strides[0]


@functools.lru_cache(maxsize=256)
def cache_shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    rot_dim: int,
    dtype: torch.dtype,
    cache_type: str,
) -> CacheShape:
    """A layer's constants for rotary and the writing of K and V; `cache_type` as for `write_kv`."""
    if rot_dim > head_dim or rot_dim % 2:
        raise ValueError(f"cos_sin rotates {rot_dim} dimensions of a head that has {head_dim}")
    codes = _types(dtype, cache_type)
    return CacheShape(heads, kv_heads, head_dim, block_size, rot_dim, *codes)


def _types(dtype: torch.dtype, cache_type: str) -> tuple[int, int]:
    """The numbers in C++ of the activations' and of the cache's type."""
    if dtype not in _DTYPES:
        raise TypeError(f"CPU kernels take float32 and bfloat16, got {dtype}")
    if cache_type not in _CACHE_TYPES:
        raise TypeError(f"CPU kernels take caches of {', '.join(_CACHE_TYPES)}, got {cache_type}")
    return _DTYPES[dtype], _CACHE_TYPES[cache_type]


def type_of_cache(cache: torch.Tensor) -> str:
    """The name of an unquantized cache's type, as `write_kv` takes it."""
    return str(cache.dtype).removeprefix("torch.")


def rotary(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotates `q` `[rows, heads, head_dim]` and `k` `[rows, kv_heads, head_dim]` in place, pairing
    dimension i with i + rot_dim / 2. `cos_sin`: float32 `[max_position, rot_dim]`, cosines then sines;
    `positions`: int64 or int32 `[rows]`, all below max_position (not checked)."""
    if q.dtype is not k.dtype:
        raise differ(q, k)
    _, kv_heads, head_dim = k.shape
    dtype = k.dtype
    shape = cache_shape(q.shape[1], kv_heads, head_dim, 0, cos_sin.shape[1], dtype, "float32")
    _call_cache(shape, q, k, None, cos_sin, positions, None, None, None, None)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_type: str | None = None,
    kv_scale: torch.Tensor | None = None,
    kv_centre: torch.Tensor | None = None,
) -> None:
    """Stores rows in a layer's cache; `octavo.kernels.reference_kv` says how those of 8 bits are rounded.

    Args:
        k, v: `[rows, kv_heads, head_dim]`.
        cache: contiguous `[num_blocks, 2, kv_heads, block_size, head_dim]`, or of int8
            `[num_blocks, 2, kv_heads, block_size * (head_dim + 2)]`, with offsets `+ 4`.
        slot_mapping: int64 `[rows]`, `block * block_size + offset`; a negative slot drops its row.
        cache_type: float32, bfloat16 (None: the cache's dtype), or of a uint8 cache fp8 (e4m3), fp8_e5m2,
            int8 or int8_offset.
        kv_scale: float32 `[2, kv_heads]`, contiguous, for the FP8 types and no others.
        kv_centre: float32 `[kv_heads, head_dim]`, contiguous: what keys of 8 bits are stored less of.
    """
    _, kv_heads, head_dim = k.shape
    kind = cache_type or type_of_cache(cache)
    block_size = _block_size(cache, kv_heads, head_dim, kind)
    shape = cache_shape(0, kv_heads, head_dim, block_size, 0, k.dtype, kind)
    _call_cache(shape, None, k, v, None, None, cache, slot_mapping, kv_scale, kv_centre)


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_type: str | None = None,
    kv_scale: torch.Tensor | None = None,
    kv_centre: torch.Tensor | None = None,
) -> None:
    """`rotary` and then `write_kv`, in one pass over the rows."""
    if q.dtype is not k.dtype:
        raise differ(q, k)
    _, kv_heads, head_dim = k.shape
    kind = cache_type or type_of_cache(cache)
    block_size = _block_size(cache, kv_heads, head_dim, kind)
    shape = cache_shape(q.shape[1], kv_heads, head_dim, block_size, cos_sin.shape[1], k.dtype, kind)
    _call_cache(shape, q, k, v, cos_sin, positions, cache, slot_mapping, kv_scale, kv_centre)


def _call_cache(
    shape: CacheShape,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    kv_scale: torch.Tensor | None,
    kv_centre: torch.Tensor | None,
) -> None:
    if q is None or cos_sin is None or positions is None:
        q_at = q_stride = cos_sin_at = positions_at = short = 0
    else:
        if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous():
            raise TypeError(f"cos_sin must be contiguous float32, got {cos_sin.dtype}")
        short = positions.dtype is torch.int32
        if not short and positions.dtype is not torch.int64:
            raise TypeError(f"positions must be int64 or int32, got {positions.dtype}")
        q_at, q_stride = q.data_ptr(), row_stride(q)
        cos_sin_at, positions_at = cos_sin.data_ptr(), positions.data_ptr()
    if v is None or cache is None or slot_mapping is None:
        v_at = v_stride = cache_at = slots_at = scale_at = centre_at = 0
    else:
        if v.dtype is not k.dtype:
            raise differ(k, v)
        if slot_mapping.dtype is not torch.int64:
            raise TypeError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
        v_at, v_stride = v.data_ptr(), row_stride(v)
        cache_at, slots_at = cache.data_ptr(), slot_mapping.data_ptr()
        scale_at = _scale_pointer(kv_scale, shape.cache_type, shape.kv_heads)
        centre_at = 0 if kv_centre is None else _centre_pointer(kv_centre, shape)
    (_lib or library()).octavo_rope_and_write_kv(
        ctypes.addressof(shape),
        q_at,
        k.data_ptr(),
        v_at,
        q_stride,
        row_stride(k),
        v_stride,
        cos_sin_at,
        positions_at,
        short,
        cache_at,
        scale_at,
        centre_at,
        slots_at,
        k.shape[0],
        torch.get_num_threads(),
    )


def _scale_pointer(kv_scale: torch.Tensor | None, cache_type: int, kv_heads: int) -> int:
    """Address of the scales that FP8 caches have, 0 for the others."""
    if (kv_scale is not None) != (cache_type in (_CACHE_TYPES["fp8"], _CACHE_TYPES["fp8_e5m2"])):
        raise ValueError("kv_scale must be given for FP8 caches, and for no others")
    if kv_scale is None:
        return 0
    if kv_scale.dtype is not torch.float32 or kv_scale.shape != (2, kv_heads) or not kv_scale.is_contiguous():
        shape = f"{kv_scale.dtype} {tuple(kv_scale.shape)}"
        raise ValueError(f"kv_scale must be contiguous float32 [2, {kv_heads}], got {shape}")
    return kv_scale.data_ptr()


def _centre_pointer(kv_centre: torch.Tensor, shape: CacheShape) -> int:
    """Address of what keys of a cache of 8 bits are stored less of."""
    if shape.cache_type in (_CACHE_TYPES["float32"], _CACHE_TYPES["bfloat16"]):
        raise ValueError("kv_centre is of caches of 8 bits, and of no others")
    wanted = (shape.kv_heads, shape.head_dim)
    if kv_centre.dtype is not torch.float32 or kv_centre.shape != wanted or not kv_centre.is_contiguous():
        got = f"{kv_centre.dtype} {tuple(kv_centre.shape)}"
        raise ValueError(f"kv_centre must be contiguous float32 {list(wanted)}, got {got}")
    return kv_centre.data_ptr()


def _block_size(cache: torch.Tensor, kv_heads: int, head_dim: int, cache_type: str) -> int:
    """Block size of a layer's cache, whose shape and dtype must fit."""
    shape, quantized = tuple(cache.shape), cache_type not in ("float32", "bfloat16")
    if behind := _BYTES_BEHIND.get(cache_type, 0):
        piece = head_dim + behind
        wanted = f"[blocks, 2, {kv_heads}, block_size * {piece}]"
        fits = len(shape) == 4 and shape[1:3] == (2, kv_heads) and shape[3] % piece == 0
        block_size = shape[-1] // piece
    else:
        wanted = f"[blocks, 2, {kv_heads}, block_size, {head_dim}]"
        fits = len(shape) == 5 and shape[1:3] == (2, kv_heads) and shape[4] == head_dim
        block_size = shape[-2]
    if not fits or not cache.is_contiguous() or (cache.dtype is torch.uint8) is not quantized:
        raise ValueError(f"cache must be contiguous {wanted} of {cache_type}, got {cache.dtype} {shape}")
    return block_size


@functools.lru_cache(maxsize=256)
def attention_shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    window: int | None,
    dtype: torch.dtype,
    cache_type: str,
    softcap: float | None = None,
) -> AttentionShape:
    """A layer's constants for `attend`. Raises ValueError for a shape that the kernel cannot take."""
    if (problem := attention_problem(heads, kv_heads, head_dim, block_size)) is not None:
        raise ValueError(problem)
    return AttentionShape(
        heads,
        kv_heads,
        head_dim,
        block_size,
        window or 0,
        scale,
        softcap or 0.0,
        *_types(dtype, cache_type),
    )


def attention_problem(heads: int, kv_heads: int, head_dim: int, block_size: int) -> str | None:
    """Why the attention kernel cannot take this shape, or None."""
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        return f"{heads} query heads over {kv_heads} KV heads: must divide, to at most {MAX_GROUP}"
    if head_dim % 4 or block_size % 4:
        return f"head_dim {head_dim} and block_size {block_size} must be multiples of 4"
    return None


def attention_batch(
    query_start: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
) -> AttentionBatch:
    """A step's batch for `attend`; points into the three int32 tensors, which the caller keeps alive."""
    for name, x in (("query_start", query_start), ("seq_lens", seq_lens), ("block_table", block_table)):
        if x.dtype is not torch.int32 or x.stride(-1) != 1:
            raise TypeError(f"{name} must be int32 with contiguous rows, got {x.dtype}, strides {x.stride()}")
    return AttentionBatch(
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        block_table.data_ptr(),
        block_table.stride(0),
        query_start.shape[0] - 1,
        torch.get_num_threads(),
    )


def attend(
    shape: AttentionShape,
    batch: AttentionBatch,
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    kv_scale: torch.Tensor | None = None,
) -> None:
    """Causal attention of a ragged batch over a paged cache, read where it lies. Checks no shapes.

    Args:
        q: `[rows, heads, head_dim]`; request i's rows are the last of its context.
        cache, kv_scale: as for `write_kv`; the cache already holds these rows' K and V.
        out: like `q`; rows that no request owns are left alone.
    """
    status = (_lib or library()).octavo_paged_attention(
        ctypes.addressof(shape),
        ctypes.addressof(batch),
        q.data_ptr(),
        row_stride(q),
        cache.data_ptr(),
        _scale_pointer(kv_scale, shape.cache_type, shape.kv_heads),
        out.data_ptr(),
        row_stride(out),
    )
    if status:
        raise RuntimeError(f"paged attention refused its arguments (status {status})")


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """First index of each row's greatest value, a NaN counting as greatest: `[rows, vocab]` to int64
    `[rows]`."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    (_lib or library()).octavo_argmax(
        logits.data_ptr(),
        out.data_ptr(),
        rows,
        vocab,
        row_stride(logits),
        dtype_code(logits),
        torch.get_num_threads(),
    )
    return out


def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> torch.Tensor:
    """Draws from `softmax(logits / temperature)` by Gumbel-max, noise and arg max in one pass.

    The noise of token v is a hash of (k0, k1, v), see `noisy_tile` in sampling.cpp.

    Args:
        logits: `[rows, vocab]`.
        temperature: float32 `[rows]`; a row with 0 is taken greedily.
        k0, k1: int32, uint32 or int64 `[rows]` (both alike), of which the lower 32 bits count.

    Returns:
        int64 `[rows]`.
    """
    rows, vocab = logits.shape
    if temperature.dtype is not torch.float32:
        raise TypeError(f"temperature must be float32, got {temperature.dtype}")
    if k0.dtype is not k1.dtype or k0.dtype not in (torch.int32, torch.uint32, torch.int64):
        raise TypeError(f"k0 and k1 must both be int32, uint32 or int64, got {k0.dtype} and {k1.dtype}")
    if not (temperature.is_contiguous() and k0.is_contiguous() and k1.is_contiguous()):
        raise ValueError("temperature, k0 and k1 must be contiguous")
    out = torch.empty(rows, dtype=torch.int64)
    (_lib or library()).octavo_gumbel_argmax(
        logits.data_ptr(),
        temperature.data_ptr(),
        k0.data_ptr(),
        k1.data_ptr(),
        k0.dtype is torch.int64,
        out.data_ptr(),
        rows,
        vocab,
        row_stride(logits),
        dtype_code(logits),
        torch.get_num_threads(),
    )
    return out
