"""Attention over every kind of cache, and what stores rows in one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from octavo.kernels.triton import (
    attention,
    cascade,
    invariant_attention,
    kv_codes,
    kv_encode,
    latent,
    rotary_kv,
    rotary_row,
)
from octavo.kv.format import KVFormat


def _quantized(fmt: KVFormat, how: int) -> tuple[torch.Tensor, kv_codes.KVCodes]:
    """A cache of 8 bits and what its kernels must know."""
    cache = torch.empty(2, *fmt.layer_block_shape(), dtype=torch.uint8)
    scale = None if fmt.dtype == "int8" else torch.empty(2, fmt.num_kv_heads)
    return cache, kv_codes.KVCodes(fmt.dtype, fmt.block_size, fmt.head_dim, fmt.offset, scale, how)


def _attention_case(
    kind: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int | None,
    rows: int,
    softcap: float | None = None,
    fmt: KVFormat | None = None,
    how: int = kv_codes.NATIVE.value,
) -> Callable[[], None]:
    """Attention over a cache of `dtype`, or over one of 8 bits as `fmt` says; `how` it decodes."""

    def call() -> None:
        requests = 32
        q = torch.empty(requests * rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        q = q[:, : heads * dim].view(-1, heads, dim)
        cache, codes = torch.empty(2, 2, kv_heads, block, dim, dtype=dtype), None
        if fmt is not None:
            cache, codes = _quantized(fmt, how)
        product = kv_codes.product_dtype(q, codes)
        table = torch.zeros(requests, 64, dtype=torch.int32)
        starts, lens = torch.zeros(requests + 1, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
        out = torch.empty(q.shape, dtype=dtype)
        if kind in ("decode", "cascade"):
            shared = None
            if kind == "cascade":
                smem = attention.shared_memory(q.device)
                tile = cascade.shared_config(
                    len(q) * heads // kv_heads, heads // kv_heads, dim, product, smem
                )
                length = torch.zeros(1, dtype=torch.int32)
                shared = attention.SharedPass(length, len(q), 4, torch.empty(1024), tile, cascade.MIN_CHUNK)
                cascade.attend_shared(q, cache, starts, table, requests, shared, 0.1, softcap, codes)
            for splits, early in ((1, False), (4, True)):
                attention.paged_decode(
                    q, cache, out, starts, lens, table, 0, requests, rows, splits,
                    torch.empty(1024), torch.zeros(1024, dtype=torch.int32), 0.1, window, softcap,
                    shared=shared, codes=codes, early=early,
                )  # fmt: skip
            if kind == "decode" and rows == 1:
                k, weight = torch.empty(1, kv_heads, dim, dtype=dtype), torch.empty(dim, dtype=dtype)
                slots = torch.zeros(1, dtype=torch.int64)
                row = rotary_row.Unrotated(k, k.clone(), torch.empty(1, dim), slots, weight, weight)
                attention.paged_decode(
                    q[:1], cache, out, starts, lens, table, 0, 1, 1, 4,
                    torch.empty(1024), torch.zeros(1024, dtype=torch.int32), 0.1, window, softcap,
                    codes=codes, early=True, unrotated=row,
                )  # fmt: skip
        else:
            attention.paged_prefill(
                q, cache, out, starts, lens, table, 3, requests, len(q), 0.1, window, softcap, codes=codes
            )

    return call


def _write_case(heads: int, kv_heads: int, dim: int, fmt: KVFormat, how: int) -> Callable[[], None]:
    """Rows into a cache of 8 bits, and its values back."""

    def call() -> None:
        cache, plain = _quantized(fmt, how)
        centred = [] if fmt.dtype == "int8" else [replace(plain, centre=torch.empty(kv_heads, dim))]
        qkv = torch.empty(4, heads + 2 * kv_heads, dim, dtype=torch.bfloat16)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        slots, weight = torch.zeros(4, dtype=torch.int64), torch.empty(dim, dtype=torch.bfloat16)
        for codes in (plain, *centred):
            for w in (None, weight):
                rotary_kv.rotary_and_write_kv(
                    q, k, v, torch.empty(64, dim), slots, cache, slots, w, w, codes=codes
                )
            rotary_kv.write_kv(k, v, cache, slots, codes)
        kv_encode.gather_kv(cache, plain, torch.zeros(4, dtype=torch.int32), 50, torch.bfloat16)

    return call


def _latent_case(dtype: torch.dtype, heads: int, rank: int, rope: int, rows: int) -> Callable[[], None]:
    """DeepSeek's latent attention: decode with and without splits for few rows, else prefill."""

    def call() -> None:
        requests = 32
        q = torch.empty(requests * rows, heads, rank + rope, dtype=dtype)
        cache = torch.empty(2, 1, 1, 16, rank + rope, dtype=dtype)
        table = torch.zeros(requests, 64, dtype=torch.int32)
        starts, lens = torch.zeros(requests + 1, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
        out = torch.empty(len(q), heads, rank, dtype=dtype)
        batch = (q, cache, out, starts, lens, table, 0, requests)
        if rows <= 8:
            for splits in (1, 4):
                latent.latent_decode(*batch, rows, splits, torch.empty(1024), rank, 0.1)
        else:
            latent.latent_prefill(*batch, len(q), rank, 0.1)
        slots = torch.zeros(len(q), dtype=torch.int64)
        latent.rotate_and_write_latent(
            q[..., rank:], q[..., rank:].clone(), torch.empty(len(q), rank + rope, dtype=dtype),
            torch.empty(rank, dtype=dtype), 1e-6, torch.empty(64, rope), slots, cache, slots,
        )  # fmt: skip

    return call


def _invariant_case(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int | None,
    rows: int,
    softcap: float | None = None,
) -> Callable[[], None]:
    """The batch-invariant attention, with and without splits."""

    def call() -> None:
        tile = invariant_attention.tile_config(
            dim, dtype, heads // kv_heads, invariant_attention.program_memory(torch.device("cpu"))
        )
        q = torch.empty(32 * rows, (heads + 2 * kv_heads) * dim, dtype=dtype)[:, : heads * dim]
        q = q.view(-1, heads, dim)
        starts, lens = torch.zeros(33, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        cache, scratch = torch.empty(2, 2, kv_heads, block, dim, dtype=dtype), torch.empty(1024)
        for splits in (1, 4)[: 1 + tile.chunked]:
            plan = invariant_attention.InvariantPlan(64, rows == 1, splits, 8, 32, 32 * rows)
            invariant_attention.invariant_attention(
                q, cache, torch.empty(q.shape, dtype=dtype), starts, lens,
                torch.zeros(32, 64, dtype=torch.int32), plan, tile, (scratch, scratch), 0.1, window, softcap,
            )  # fmt: skip

    return call


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """Paged, latent and batch-invariant attention, rotation, writes."""
    found: list[tuple[str, Callable[[], Any]]] = []
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for kind, dtype, heads, kv_heads, dim, block, window, rows in [
        ("decode", bf16, 32, 8, 128, 16, None, 1),
        ("decode", bf16, 16, 8, 128, 16, None, 1),
        ("decode", bf16, 32, 8, 128, 16, None, 4),
        ("decode", bf16, 9, 3, 64, 16, None, 1),
        ("decode", bf16, 14, 2, 64, 32, None, 1),
        ("decode", f16, 32, 32, 80, 8, None, 1),
        ("decode", bf16, 32, 32, 96, 16, 2048, 1),
        ("decode", bf16, 4, 1, 256, 16, 512, 1),
        ("decode", f32, 9, 3, 64, 16, None, 1),
        ("decode", f32, 4, 1, 256, 16, None, 8),
        ("cascade", bf16, 32, 8, 128, 16, None, 1),
        ("cascade", bf16, 32, 8, 128, 16, None, 4),
        ("cascade", bf16, 16, 8, 128, 16, None, 1),
        ("cascade", bf16, 9, 3, 64, 16, None, 1),
        ("cascade", f16, 32, 32, 80, 8, None, 1),
        ("cascade", bf16, 8, 1, 256, 16, None, 1),
        ("cascade", f32, 9, 3, 64, 16, None, 1),
        ("cascade", f32, 4, 1, 256, 16, None, 1),
        ("prefill", bf16, 32, 8, 128, 16, None, 64),
        ("prefill", bf16, 16, 8, 128, 16, None, 64),
        ("prefill", bf16, 9, 3, 64, 16, None, 64),
        ("prefill", bf16, 14, 2, 64, 32, None, 64),
        ("prefill", f16, 32, 32, 80, 8, None, 64),
        ("prefill", bf16, 32, 32, 96, 16, 2048, 64),
        ("prefill", bf16, 4, 1, 256, 16, 512, 64),
        ("prefill", f32, 9, 3, 64, 16, None, 64),
        ("prefill", f32, 4, 1, 256, 16, None, 64),
    ]:
        shape = f"{heads}/{kv_heads}x{dim} block {block} window {window} rows {rows}"
        name = f"paged_{kind} {str(dtype)[6:]} {shape}"
        found.append((name, _attention_case(kind, dtype, heads, kv_heads, dim, block, window, rows)))

    for kind, dtype, heads, kv_heads, dim, window, rows in [  # Gemma 2
        ("decode", bf16, 8, 4, 256, 4096, 1),
        ("decode", bf16, 16, 8, 128, None, 1),
        ("prefill", bf16, 8, 4, 256, 4096, 64),
        ("prefill", bf16, 8, 4, 256, None, 64),
        ("prefill", f32, 8, 4, 256, 4096, 64),
    ]:
        name = f"paged_{kind} {str(dtype)[6:]} {heads}/{kv_heads}x{dim} window {window} rows {rows} capped"
        found.append((name, _attention_case(kind, dtype, heads, kv_heads, dim, 16, window, rows, 50.0)))

    for dtype, heads, rank, rope, rows in [
        (bf16, 16, 512, 64, 1),
        (bf16, 128, 512, 64, 1),
        (bf16, 16, 512, 64, 64),
        (bf16, 128, 512, 64, 64),
        (f32, 16, 512, 64, 1),
        (f32, 16, 512, 64, 64),
    ]:
        name = f"latent {str(dtype)[6:]} {heads}x{rank}+{rope} rows {rows}"
        found.append((name, _latent_case(dtype, heads, rank, rope, rows)))

    positions, slots = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    for heads, kv_heads, dim, rot, norm_dtype in [
        (32, 8, 128, 128, None),
        (16, 8, 128, 128, bf16),
        (32, 32, 80, 32, bf16),
        (4, 1, 256, 256, f32),
    ]:
        qkv = torch.empty(4, (heads + 2 * kv_heads) * dim, dtype=bf16)
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        q, k, v = q.view(4, heads, dim), k.view(4, kv_heads, dim), v.view(4, kv_heads, dim)
        cache = torch.empty(2, 2, kv_heads, 16, dim, dtype=bf16)
        w = None if norm_dtype is None else torch.empty(dim, dtype=norm_dtype)
        rotate = functools.partial(
            rotary_kv.rotary_and_write_kv, q, k, v, torch.empty(64, rot), positions, cache, slots, w, w
        )
        found.append((f"rotary_and_write_kv {heads}/{kv_heads}x{dim} rot {rot} norm {norm_dtype}", rotate))
        write = functools.partial(rotary_kv.write_kv, k, v, cache, slots)
        found.append((f"write_kv {kv_heads}x{dim}", write))
    for heads, kv_heads, dim in [(32, 8, 128), (32, 32, 128), (9, 3, 64), (4, 1, 256)]:
        for kv_dtype, offset, how in [
            ("fp8", False, kv_codes.NATIVE.value),
            ("fp8", False, kv_codes.PACKED.value),
            ("fp8_e5m2", False, kv_codes.PACKED.value),
            ("int8", False, kv_codes.PACKED.value),
            ("int8", True, kv_codes.PACKED.value),
        ]:
            fmt = KVFormat(kv_dtype, 16, kv_heads, dim, offset=offset)
            name = f"kv {kv_dtype}{' offset' if offset else ''} way {how} {heads}/{kv_heads}x{dim}"
            for kind, rows in [("decode", 1), ("cascade", 1), ("prefill", 64)]:
                case = _attention_case(kind, bf16, heads, kv_heads, dim, 16, None, rows, None, fmt, how)
                found.append((f"paged_{kind} {name}", case))
            if how == kv_codes.NATIVE.value and kv_dtype == "fp8" and heads == 32:
                continue
            found.append((f"write {name}", _write_case(heads, kv_heads, dim, fmt, how)))
    for dtype, heads, kv_heads, dim, window, rows, softcap in [
        (bf16, 32, 8, 128, None, 1, None),
        (bf16, 32, 8, 128, None, 64, None),
        (bf16, 16, 8, 128, None, 1, None),
        (bf16, 9, 3, 64, None, 64, None),
        (f16, 32, 32, 96, 2048, 64, None),
        (bf16, 8, 4, 256, 4096, 64, 50.0),
        (bf16, 8, 4, 256, None, 1, 50.0),
        (bf16, 71, 1, 64, None, 1, None),
        (f32, 32, 8, 128, None, 1, None),
        (f32, 4, 1, 256, None, 64, None),
    ]:
        name = f"invariant_attention {str(dtype)[6:]} {heads}/{kv_heads}x{dim} window {window} rows {rows}"
        found.append((name, _invariant_case(dtype, heads, kv_heads, dim, 16, window, rows, softcap)))
    return found
