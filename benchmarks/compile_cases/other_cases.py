"""What is neither attention nor a product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from octavo.kernels.triton import (
    activation,
    batch,
    bitmask,
    block_copy,
    copy_out,
    drafts,
    embedding,
    logprobs,
    norm,
    peers,
    sampling,
    scale_rows,
)


def _batch_kernels() -> None:
    """A step's rows gathered, its blocks mapped and its tokens appended."""
    longs, ints = torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
    table, blocks = torch.zeros(5, 1024, dtype=torch.int32), torch.zeros(5, 64, dtype=torch.int32)
    rows = (torch.zeros(24, dtype=torch.int32), torch.zeros(24, dtype=torch.int64))
    batch.gather_rows(longs, ints, longs.clone(), table, *rows, longs.clone(), ints[:4].clone())
    batch.map_blocks(longs, ints, longs, blocks, 16, 8, torch.zeros_like(blocks), rows[1])
    batch.append_tokens(longs, longs, torch.zeros(4, 1, dtype=torch.int32), table)


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
    drafts.stands_by_chance(
        longs, longs, longs, longs, torch.zeros(5, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.bool)
    )
    places = [longs.clone() for _ in range(4)]
    drafts.begin_follow(longs, ints, longs, longs, ints[:4], longs, *places)
    drafts.begin_chain(longs, longs, longs, longs, *places[:3])
    copy_out.copy_out([(tokens, tokens.clone()), (ints, ints.clone())])
    drafts.place_rows(
        longs, ints, longs, longs, longs, table, blocks, 1, 16, *rows, ints[:4], torch.zeros_like(blocks),
        rows[1].clone(),
    )  # fmt: skip
    for ids in (None, torch.zeros(1024, dtype=torch.int64)):
        drafts.append_drafts(longs, longs, longs, longs, ids, table, 2)


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """Norms, activations, sums over ranks, copies of blocks, drafts, sampling."""
    found: list[tuple[str, Callable[[], Any]]] = []
    bf16, f32 = torch.bfloat16, torch.float32
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
    for piece in (65536, 12288, 24):
        pages = [torch.empty(2, piece, dtype=torch.uint8) for _ in range(4)]
        copier = block_copy.KernelBlockCopier(pages, torch.empty(2, 4, piece, dtype=torch.uint8))
        ids = np.zeros(2, np.int32)
        found.append((f"block_copy out {piece}", functools.partial(copier.out, ids, ids)))
        found.append((f"block_copy into {piece}", functools.partial(copier.into, ids, ids)))
    found.append(("batch", _batch_kernels))
    found.append(("drafts", _draft_kernels))
    sums, scale = torch.empty(4, 4096, dtype=torch.int32), torch.empty(4096)
    for bias in (None, weight):
        scaled = functools.partial(scale_rows.scale_rows, sums, scale[:4], scale, bias, bf16)
        found.append((f"scale_rows{'' if bias is None else ' bias'}", scaled))
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
