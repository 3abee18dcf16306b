"""Compiles every Triton kernel for a GPU architecture on a machine that needs no GPU.

Usage: python benchmarks/compile_gpu_kernels.py [--capability 90] [--only paged_decode]

Calls the kernels' own wrappers on CPU tensors with a stand-in for the driver, so that what is
compiled is exactly what a launch would compile. Prints shared memory, registers and spills, and
which matrix instructions and asynchronous copies are in the code; ends with 1 if one fails.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from compile_only import compile_only

from octavo.kernels.reference_tiles import NF4, Tiles, tiles_shapes
from octavo.kernels.triton import (
    activation,
    attention,
    bitmask,
    block_copy,
    cascade,
    drafts,
    embedding,
    expand_bytes,
    invariant_attention,
    invariant_linear,
    kv_codes,
    kv_encode,
    latent,
    linear,
    logprobs,
    norm,
    peers,
    rotary_kv,
    rotary_row,
    row_8bit,
    row_8bit_warps,
    rows_8bit,
    sampling,
    skinny_8bit,
    skinny_linear,
    tiles,
    tiles_row,
    tiles_row_warps,
    weight_only_choice,
)
from octavo.kv.format import KVFormat

# Shared memory of a multiprocessor by compute capability: it decides between tiles.
_SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}


def _report(compiled: Any) -> str:
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([ptxas, "--dump-resource-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    regs, stack = found.groups() if found else ("?", "?")
    ptx = compiled.asm["ptx"]
    uses = {
        "wgmma": "wgmma.mma_async" in ptx,
        "mma": "mma.sync" in ptx,
        "cp.async": "cp.async.c" in ptx,
        "16B loads": ".v4.b32" in ptx or "0x10" in ptx,
    }
    return (
        f"shared {compiled.metadata.shared / 1024:6.1f} KiB, registers {regs:>3}, stack {stack:>3}, "
        f"warps {compiled.metadata.num_warps:2}: {' '.join(k for k, v in uses.items() if v)}"
    )


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


def _draft_kernels() -> None:
    """Drafts of 4 requests judged, and the next ones prepared and written."""
    longs, ints = torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
    table, blocks = torch.zeros(5, 1024, dtype=torch.int32), torch.zeros(5, 64, dtype=torch.int32)
    rows = (torch.zeros(24, dtype=torch.int32), torch.zeros(24, dtype=torch.int64))
    tokens = torch.zeros(4, 6, dtype=torch.int32)
    for stands in (None, torch.zeros(4, 5, dtype=torch.bool)):
        drafts.judge_drafts(
            longs, ints, longs, longs, rows[0], stands, table, longs, tokens, ints[:4], longs.clone()
        )
    drafts.place_rows(
        longs, ints, longs, longs, longs, table, blocks, 1, 16, *rows, ints[:4], torch.zeros_like(blocks),
        rows[1].clone(),
    )  # fmt: skip
    for ids in (None, torch.zeros(1024, dtype=torch.int64)):
        drafts.append_drafts(longs, longs, longs, longs, ids, table, 2)


def _cases_8bit() -> list[tuple[str, Callable[[], Any]]]:
    """Products in 8 bits, and what makes their rows."""
    found: list[tuple[str, Callable[[], Any]]] = []
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for form in (rows_8bit.FP8_ROWS, rows_8bit.FP8_GROUPS, rows_8bit.INT8_ROWS):
        name = f"{str(form.dtype)[6:]}{' groups' if form.grouped else ''}"
        x, gates = torch.empty(4, 4096, dtype=bf16), torch.empty(4, 28672, dtype=bf16)
        norm_weight = torch.empty(4096, dtype=bf16)
        for what, call in {
            "quantize_rows": functools.partial(rows_8bit.quantize_rows, x, form),
            "rms_norm_quantize": functools.partial(
                rows_8bit.rms_norm_quantize, x, x.clone(), norm_weight, 1e-6, form
            ),
            "gated_quantize": functools.partial(rows_8bit.gated_quantize, gates, "silu", form),
        }.items():
            found.append((f"{what} {name}", call))
    for dtype, blocks in ((fp8, False), (fp8, True), (torch.int8, False)):
        kind = f"{str(dtype)[6:]}{' blocks' if blocks else ''}"
        for size_in, size_out, act, cut in [
            (4096, 6144, None, (4, 8, 2)),
            (4096, 6144, None, (4, 8, 2, 2)),
            (4096, 28672, "silu", (4, 8, 4)),
            (14336, 4096, None, (4, 8, 4, 4)),
            (1024, 6144, "silu", (8, 4, 1)),
        ]:
            scale = torch.empty(size_out // 128, size_in // 128) if blocks else torch.empty(size_out)
            weight = torch.empty(size_out, size_in, dtype=dtype)
            normed = None if len(cut) > 3 else (torch.empty(size_in, dtype=bf16), 1e-6)
            row = functools.partial(
                row_8bit.row_8bit,
                torch.empty(1, size_in, dtype=bf16),
                weight,
                scale,
                act=act,
                norm=normed,
                config=cut,
            )
            found.append((f"row_8bit {kind} {size_in} to {size_out} {act or ''} {cut}", row))
        if not blocks:
            for size_out, warps_cut, normed in ((4096, (16, 256, 8), False), (6144, (16, 512, 8), True)):
                one = torch.empty(1, 4096, dtype=bf16)
                row = functools.partial(
                    row_8bit_warps.row_8bit_warps,
                    one,
                    torch.empty(size_out, 4096, dtype=dtype),
                    torch.empty(size_out),
                    None,
                    None,
                    (torch.empty(4096, dtype=bf16), 1e-6) if normed else None,
                    one if normed else None,
                    row_8bit_warps.WarpsConfig(*warps_cut),
                )
                found.append((f"row_8bit_warps {kind} 4096 to {size_out} {warps_cut}", row))
        for rows, tile in [
            (8, (64, 128, 8, 4, 2, 32, True, 16)),
            (32, (64, 128, 7, 4, 1, 32, True, 32)),
            (64, (64, 128, 6, 4, 1, 32, True, 64)),
            (512, (128, 128, 4, 8, 1, 0, False, 128)),
        ]:
            codes = torch.empty(rows, 4096, dtype=dtype)
            scales = torch.empty(rows, 32) if blocks else torch.empty(rows)
            product = functools.partial(
                skinny_8bit.skinny_8bit,
                rows_8bit.Rows8(codes, scales),
                torch.empty(6144, 4096, dtype=dtype),
                torch.empty(48, 32) if blocks else torch.empty(6144),
                None,
                bf16,
                skinny_linear.SkinnyConfig(*tile),
            )
            found.append((f"skinny_8bit {kind} {rows} rows {tile}", product))
    return found


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """Every kernel, in the shapes of the models that the project is measured with, and awkward ones."""
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

    x = torch.empty(4, 4096, dtype=bf16)
    weight = torch.empty(4096, dtype=bf16)
    wide = torch.empty(4096)
    found.append(("rms_norm", lambda: norm.rms_norm(x, weight, 1e-6)))
    found.append(("add_rms_norm", lambda: norm.add_rms_norm(x, x.clone(), weight, 1e-6)))
    found.append(("add_rms_norm, float32 weight", lambda: norm.add_rms_norm(x, x.clone(), wide, 1e-6)))
    found.append(("layer_norm", lambda: norm.layer_norm(x, weight, weight, 1e-5)))
    found.append(("add_layer_norm", lambda: norm.add_layer_norm(x, x.clone(), weight, None, 1e-5)))
    found.append(("silu_and_mul", lambda: activation.silu_and_mul(x)))
    found.append(("gelu_tanh_and_mul", lambda: activation.gelu_tanh_and_mul(x)))
    tokens = torch.zeros(4, dtype=torch.int32)
    found.append(("look_up_part", lambda: embedding.look_up_part(x, tokens, 2)))
    for kind in (bf16, f32):
        word = {2: torch.int16, 4: torch.int32}[kind.itemsize]
        box = peers.PeerBox(
            0, 2, torch.zeros(2, 2, 64, 4096, dtype=word), torch.zeros(2, dtype=torch.int64),
            torch.zeros(64, dtype=torch.int32),
        )  # fmt: skip
        for rows in (4, 40):
            part = torch.empty(rows, 4096, dtype=kind)
            name = f"{str(kind)[6:]} {rows} rows"
            found.append((f"sum_over_ranks {name}", functools.partial(peers.sum_over_ranks, part, box)))
            both = functools.partial(
                peers.sum_add_rms_norm, part, part.clone(), torch.empty(4096, dtype=kind), 1e-6, box
            )
            found.append((f"sum_add_rms_norm {name}", both))
        if kind is f32:
            best = functools.partial(
                peers.best_over_ranks, wide[:8].view(4, 2), torch.zeros(4, 2, dtype=torch.int32), 8, box
            )
            found.append(("best_over_ranks", best))
    found.append(("softcap", lambda: activation.softcap(x, 30.0)))
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
    for rows, size_in, size_out in [(1, 4096, 6144), (1, 14336, 4096), (4, 4096, 28672), (3, 576, 1536)]:
        product = functools.partial(
            linear.few_rows_linear,
            torch.empty(rows, size_in, dtype=bf16),
            torch.empty(size_out, size_in, dtype=bf16),
        )
        found.append((f"few_rows_linear {rows} x {size_in} to {size_out}", product))
    for rows, size_in, size_out, act, norm_dtype in [
        (1, 4096, 6144, None, bf16),
        (1, 4096, 28672, "silu", bf16),
        (1, 1024, 6144, "silu", bf16),
        (1, 2304, 18432, "gelu_tanh", f32),
        (1, 8192, 57344, "silu", bf16),
        (4, 4096, 28672, "silu", bf16),
        (3, 576, 3072, "silu", bf16),
    ]:
        product = functools.partial(
            linear.rms_norm_few_rows_linear,
            torch.empty(rows, size_in, dtype=bf16),
            torch.empty(rows, size_in, dtype=bf16),
            torch.empty(size_in, dtype=norm_dtype),
            1e-6,
            torch.empty(size_out, size_in, dtype=bf16),
            act=act,
        )
        name = f"rms_norm_few_rows_linear {rows} x {size_in} to {size_out} {act} norm {str(norm_dtype)[6:]}"
        found.append((name, product))
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
    for rows, size_in, size_out, act, cut in [
        (16, 4096, 4096, None, (16, 256, 6, 4, 1, 32)),
        (32, 4096, 6144, None, (64, 128, 4, 4, 1, 32)),
        (32, 3072, 1024, None, (32, 256, 3, 4, 4, 32)),
        (32, 4096, 28672, "silu", (64, 128, 3, 4, 1, 32)),
        (32, 1024, 6144, "gelu_tanh", (32, 128, 4, 4, 2, 32)),
        (64, 14336, 4096, None, (128, 64, 6, 8, 4, 32)),
        (128, 4096, 4096, None, (128, 64, 4, 8, 4, 32)),
        (128, 4096, 4096, None, (64, 64, 4, 8, 2, 32, False)),
        (17, 577, 1531, None, (32, 128, 4, 4, 1, 32)),
        (3, 64, 1, None, (16, 64, 3, 4, 1, 32)),  # Triton makes a size of 1 a constant
    ]:
        product = functools.partial(
            skinny_linear.skinny_linear,
            torch.empty(rows, size_in, dtype=bf16),
            torch.empty(size_out, size_in, dtype=bf16),
            None,
            act,
            skinny_linear.SkinnyConfig(*cut),
        )
        found.append((f"skinny_linear {rows} x {size_in} to {size_out} {act or ''} {cut}", product))
    found += _cases_8bit()
    for form in ("int4 128", "int4 32 zeros", "int4", "nf4 64"):
        kind, *rest = form.split()
        group = int(rest[0]) if rest else 4096
        nf4 = kind == "nf4"
        for size_out, act in ((6144, None), (28672, "silu")):
            size, codes, scales, zeros = tiles_shapes(size_out, 4096, 4096 // group, 4 if nf4 else 2)
            tiled = Tiles(
                torch.empty(codes, dtype=torch.int16),
                torch.empty(scales, dtype=f32 if nf4 else torch.int32),
                torch.empty(zeros, dtype=torch.int32) if "zeros" in rest else None,
                size,
                f32 if nf4 else bf16,
                torch.empty(16) if nf4 else None,
                NF4 if nf4 else None,
            )
            for rows in (8, 16, 32, 64, 128):
                cut = weight_only_choice.default_cut(rows, 16, size_out, bool(act), 132)
                assert cut is not None
                product = functools.partial(
                    tiles.tiles_linear,
                    torch.empty(rows, 4096, dtype=bf16),
                    tiled,
                    None,
                    act,
                    tiles.TilesConfig(cut.block_out, cut.stages, cut.warps, cut.splits, 16, cut.tile_rows),
                )
                found.append((f"tiles_linear {form} {rows} x 4096 to {size_out} {act or ''} {cut}", product))
            one = torch.empty(1, 4096, dtype=bf16)
            for norm_weight in (None, torch.empty(4096, dtype=bf16)):
                row = weight_only_choice.default_row_config(
                    4096, size_out, bool(act), norm_weight is not None, 132
                )
                product = functools.partial(
                    tiles_row.tiles_row_linear, one, tiled, None, act, row, norm_weight, 1e-6, one
                )
                norms = "" if norm_weight is None else "norm"
                found.append(
                    (f"tiles_row_linear {form} 4096 to {size_out} {act or ''} {norms} {row}", product)
                )
            if act is None:
                for warps in (tiles_row_warps.WarpsConfig(16, 16), tiles_row_warps.WarpsConfig(32, 8, 3, 64)):
                    product = functools.partial(
                        tiles_row_warps.tiles_row_warps_linear, one, tiled, None, warps
                    )
                    found.append((f"tiles_row_warps_linear {form} 4096 to {size_out} {warps}", product))
            found.append((f"expand_tiles {form}", functools.partial(tiles.expand_tiles, tiled, 4096, bf16)))
    for kind in (torch.int8, torch.float8_e4m3fn):
        codes = torch.empty(6144, 4096, dtype=kind)
        for scale in (torch.empty(6144), torch.empty(48, 32)):
            for rows in (1, 32, 64):
                cut = weight_only_choice.default_cut(rows, 32, 6144, False, 132)
                assert cut is not None
                config = skinny_linear.SkinnyConfig(
                    cut.block_out, 128, cut.stages, cut.warps, cut.splits, 32, tile_rows=cut.tile_rows
                )
                x8 = torch.empty(rows, 4096, dtype=bf16)
                product = functools.partial(skinny_linear.skinny_linear, x8, codes, None, None, config, scale)
                found.append((f"skinny_linear {str(kind)[6:]} {tuple(scale.shape)} {rows} rows", product))
            expand = functools.partial(expand_bytes.expand_bytes, codes, scale, bf16)
            found.append((f"expand_bytes {str(kind)[6:]} {tuple(scale.shape)}", expand))
    for piece in (65536, 12288, 24):
        pages = [torch.empty(2, piece, dtype=torch.uint8) for _ in range(4)]
        copier = block_copy.KernelBlockCopier(pages, torch.empty(2, 4, piece, dtype=torch.uint8))
        ids = np.zeros(2, np.int32)
        found.append((f"block_copy out {piece}", functools.partial(copier.out, ids, ids)))
        found.append((f"block_copy into {piece}", functools.partial(copier.into, ids, ids)))
    for dtype in (bf16, f32):
        for tile in invariant_linear.all_tiles(dtype):
            shape = (torch.empty(70, 4096, dtype=dtype), torch.empty(6144, 4096, dtype=dtype))
            product = functools.partial(invariant_linear.invariant_linear, *shape, tile=tile)
            found.append((f"invariant_linear {str(dtype)[6:]} {tile.block_m} x {tile.block_n}", product))
    found.append(("drafts", _draft_kernels))
    keys, temperature = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    wide_logits = torch.empty(4, 128256)
    found.append(("logsumexp", lambda: logprobs.logsumexp(wide_logits)))
    found.append(("ranking_keys", lambda: logprobs.ranking_keys(wide_logits)))
    for dtype in (f32, bf16):
        logits = torch.empty(4, 128256, dtype=dtype)
        masked = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4008, dtype=torch.int32))
        forbid = functools.partial(bitmask.forbid_tokens, logits, *masked)
        found.append((f"forbid_tokens {str(dtype)[6:]}", forbid))
        found.append((f"argmax {str(dtype)[6:]}", functools.partial(sampling.argmax, logits)))
        sample = functools.partial(sampling.gumbel_argmax, logits, temperature, keys, keys)
        found.append((f"gumbel_argmax {str(dtype)[6:]}", sample))
    return found


def main() -> int:
    """Compiles all cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--capability", type=int, default=90, help="compute capability, as 90 for 9.0")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    if args.capability not in _SHARED_KIB:
        parser.error(f"--capability {args.capability} is not known: use one of {sorted(_SHARED_KIB)}")
    compiled = compile_only(args.capability)
    attention.shared_memory = lambda device: _SHARED_KIB[args.capability] << 10
    invariant_attention.program_memory = lambda device: (_SHARED_KIB[args.capability] - 1) << 10
    failures = 0
    for name, call in cases():
        if args.only not in name:
            continue
        compiled.clear()
        start = time.perf_counter()
        try:
            call()
        except Exception as error:
            failures += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")
            continue
        print(f"{name} ({time.perf_counter() - start:.1f} s)")
        for kernel_name, kernel in compiled:
            print(f"    {kernel_name.strip('_'):22} {_report(kernel)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
