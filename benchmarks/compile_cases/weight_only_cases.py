"""Products of 16-bit rows with weights of 4 and 8 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from octavo.kernels.reference_tiles import NF4, Tiles, tiles_shapes
from octavo.kernels.triton import (
    expand_bytes,
    skinny_linear,
    tiles,
    tiles_row,
    tiles_row_warps,
    weight_only_choice,
)


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """Tiles of int4 and NF4 for one row and for many, bytes, and their expansion."""
    found: list[tuple[str, Callable[[], Any]]] = []
    bf16, f32 = torch.bfloat16, torch.float32
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
    return found
