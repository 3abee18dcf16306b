"""Products in 8 bits, and what makes their rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from octavo.kernels.triton import row_8bit, row_8bit_warps, rows_8bit, skinny_8bit, skinny_linear


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """Rows of FP8 and int8 with scales for each, or for groups; one row, and up to 512."""
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
