"""Times attention over KV caches of 16 and of 8 bits on the GPU against the bytes that it must read.

Usage: python benchmarks/kv_attention.py [--only decode,prefill,write] [--tune] [--json FILE]

Each figure is the median over replays of a CUDA graph of many calls over rotating caches, larger than the L2.
The floor is the cache's bytes over 4.32 TB/s (an H200's), or for many rows operations over 800 TFLOP/s.
--tune tries other tiles and numbers of splits of the decode kernel, and prints the best of each.

Predicted for the decode kernel, from its instructions as compiled for capability 9.0 (heads of 128, tiles of
128 positions, 4 warps; instructions of a warp in a tile, which a multiprocessor issues in as many cycles):

    cache       bytes of a tile   cycles to read it   instructions   share
    bfloat16         65,536             3,560              793        22%
    fp8              32,768             1,780              739        42%
    fp8_e5m2         32,768             1,780              683        38%
    int8             33,280             1,810             1095        61%
    int8+offset      33,792             1,840             1225        67%

(4.32 TB/s are 18.4 bytes a cycle of 1.78 GHz and multiprocessor.) All stay bound by bytes: fp8 within 5% of
bfloat16's share of the memory's rate, int8 within 10%. The same tile serves one query head a KV head and
sixteen: 16 lanes are the least of a matrix instruction. Without matrix instructions, for one query head, an
fp8 number takes about 4 instructions of a lane (half a conversion, one to float32, one to multiply and add,
and the sums across lanes): 1024 a warp and tile. So there is no such kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpu_kernels import copies, measure, multiprocessors

from octavo.kernels.triton import attention, kv_codes, rotary_kv
from octavo.kernels.triton.kv_codes import KVCodes
from octavo.kv.format import KVFormat

BANDWIDTH, RATE = 4.32e12, 800e12
BLOCK = 16


class Kind(NamedTuple):
    """A cache's numbers; `how` is one of `KVCodes`."""

    name: str
    dtype: str
    offset: bool = False
    how: int | None = None


KINDS = [
    Kind("bfloat16", "bfloat16"),
    Kind("fp8", "fp8"),
    Kind("fp8 by bits", "fp8", how=kv_codes.PACKED.value),
    Kind("fp8_e5m2", "fp8_e5m2"),
    Kind("int8", "int8"),
    Kind("int8+offset", "int8", offset=True),
]


class Batch:
    """Requests of (rows, context) over a paged cache in random block order."""

    def __init__(self, kind: Kind, shapes: list[tuple[int, int]], heads: int, kv_heads: int, dim: int):
        fmt = KVFormat(kind.dtype, BLOCK, kv_heads, dim, offset=kind.offset)
        rows, contexts = [r for r, _ in shapes], [c for _, c in shapes]
        counts = [-(-c // BLOCK) for c in contexts]
        self.table = torch.zeros(len(rows), max(counts), dtype=torch.int32, device="cuda")
        order = torch.randperm(sum(counts), device="cuda", dtype=torch.int32)
        for row, part in zip(self.table, order.split(counts), strict=True):
            row[: len(part)] = part
        shape = (sum(counts), *fmt.layer_block_shape())
        self.codes = None
        if fmt.quantized:
            self.cache = torch.randint(0, 0x70, shape, dtype=torch.uint8, device="cuda")
            scale = None
            if kind.dtype == "int8":
                self.cache[..., BLOCK * dim :].view(torch.float16).fill_(0.01)
            else:
                scale = torch.full((2, kv_heads), 0.01, device="cuda")
            self.codes = KVCodes(kind.dtype, BLOCK, dim, kind.offset, scale, kind.how)
        else:
            self.cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        self.q = torch.randn(sum(rows), heads, dim, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.shapes, self.kv_heads, self.scale = shapes, kv_heads, dim**-0.5
        self.kv_bytes = sum(contexts) * fmt.layer_block_bytes() / BLOCK
        self.operations = sum(4 * (r * c - r * (r - 1) // 2) for r, c in shapes) * heads * dim

    def decode(
        self, bound: int, splits: int = 0, config: attention.TileConfig | None = None
    ) -> Callable[[], None]:
        """A call of the decode kernel, planned for contexts of `bound`."""
        n, heads, dim = self.q.shape
        splits = splits or attention.choose_splits(n * self.kv_heads, bound, multiprocessors())
        sizes = attention.decode_workspace_sizes(n, self.kv_heads, heads // self.kv_heads, dim, 1, splits)
        partials = torch.empty(sizes[0], device="cuda")
        counters = torch.zeros(sizes[1], dtype=torch.int32, device="cuda")
        return lambda: attention.paged_decode(
            self.q, self.cache, self.out, self.starts, self.lens, self.table, 0, n, 1, splits,
            partials, counters, self.scale, config=config, codes=self.codes,
        )  # fmt: skip

    def prefill(self) -> Callable[[], None]:
        """A call of the prefill kernel."""
        return lambda: attention.paged_prefill(
            self.q, self.cache, self.out, self.starts, self.lens, self.table, 0, len(self.shapes),
            len(self.q), self.scale, codes=self.codes,
        )  # fmt: skip


LLAMA_2_7B, LLAMA_8B = (32, 32, 128), (32, 8, 128)
RAMP = [256 + 1792 * i // 27 for i in range(28)]  # in and out: 28 requests under way
# Name, heads, contexts, bound. A graph's bound is the longest context that the engine admits.
DECODES = [
    ("llama-2-7b, 14 of 256..2048", LLAMA_2_7B, RAMP[::2], 2048),
    ("llama-2-7b, 28 of 256..2048", LLAMA_2_7B, RAMP, 2048),
    ("llama-8b, 32 of 384", LLAMA_8B, [384] * 32, 12288),
    ("llama-8b, 32 of 4096", LLAMA_8B, [4096] * 32, 4096),
    ("llama-8b, 1 of 32768", LLAMA_8B, [32768], 32768),
    ("llama-8b, 256 of 200..2000", LLAMA_8B, [200 + 1800 * i // 255 for i in range(256)], 2048),
]
PREFILLS = [
    ("llama-8b, 1 x 2048 after 6144", LLAMA_8B, [(2048, 8192)]),
    ("llama-8b, 64 x 64 after 4096", LLAMA_8B, [(64, 4160)] * 64),
    ("llama-2-7b, 16 x 256", LLAMA_2_7B, [(256, 256)] * 16),
]
# Tiles of the decode kernel: positions, stages, warps. With the block table between, stages 3 and 4 hold one
# tile in flight, 5 and 6 two.
TILES = [(64, 3, 2), (64, 3, 4), (64, 5, 4), (128, 3, 4), (128, 5, 4), (128, 3, 8), (256, 3, 8), (256, 3, 4)]


def bench_decode(tune: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for (name, shape, contexts, bound), kind in itertools.product(DECODES, KINDS):
        first = Batch(kind, [(1, c) for c in contexts], *shape)
        batches = [first]
        for _ in range(copies(int(first.kv_bytes), 12) - 1):
            batches.append(Batch(kind, first.shapes, *shape))
        seconds = measure([b.decode(bound) for b in batches])
        rows.append(_row("decode", name, kind, seconds, first.kv_bytes / BANDWIDTH))
        if tune:
            _tune(batches, bound)
    return rows


def _tune(batches: list[Batch], bound: int) -> None:
    default = attention.choose_splits(len(batches[0].q) * batches[0].kv_heads, bound, multiprocessors())
    tried = []
    for tile in TILES:
        config = attention.TileConfig(0, *tile)
        for splits in sorted({default, max(1, default // 2), min(64, default * 2)}):
            try:
                seconds = measure([b.decode(bound, splits, config) for b in batches], 3)
            except Exception as error:  # a tile that does not fit is an answer too
                print(f"    {config}: {type(error).__name__}")
                break
            tried.append((seconds, splits, tile))
    for seconds, splits, tile in sorted(tried)[:4]:
        print(f"    {seconds * 1e6:8.1f} us: splits {splits} ({default}), positions, stages, warps {tile}")


def bench_prefill() -> list[dict[str, Any]]:
    rows = []
    for (name, shape, shapes), kind in itertools.product(PREFILLS, KINDS):
        batch = Batch(kind, shapes, *shape)
        floor = max(batch.kv_bytes / BANDWIDTH, batch.operations / RATE)
        rows.append(_row("prefill", name, kind, measure([batch.prefill()]), floor))
    return rows


def bench_write() -> list[dict[str, Any]]:
    """Rotation and writing; the floor reads and writes each row once."""
    found = []
    for count, (heads, kv_heads, dim), kind in itertools.product((28, 8192), (LLAMA_2_7B, LLAMA_8B), KINDS):
        blocks = count // BLOCK + 1
        slots = torch.randperm(blocks * BLOCK, device="cuda")[:count]
        angles = torch.randn(count, dim, device="cuda")
        calls = []
        moved = count * dim * 2 * (2 * heads + 5 * kv_heads)
        for _ in range(copies(moved, 12)):
            batch = Batch(kind, [(1, blocks * BLOCK)], heads, kv_heads, dim)
            qkv = torch.randn(count, heads + 2 * kv_heads, dim, device="cuda").bfloat16()
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            calls.append(
                lambda q=q, k=k, v=v, b=batch, angles=angles, slots=slots: rotary_kv.rotary_and_write_kv(
                    q, k, v, angles, None, b.cache, slots, codes=b.codes
                )
            )
        name = f"{count} rows of {heads}/{kv_heads} heads"
        found.append(_row("write", name, kind, measure(calls), moved / BANDWIDTH))
    return found


def _row(what: str, name: str, kind: Kind, seconds: float, floor: float) -> dict[str, Any]:
    print(
        f"{what:8} {name:32} {kind.name:12} {seconds * 1e6:9.1f} us, floor {floor * 1e6:8.1f}, "
        f"{floor / seconds:5.2f} of it",
        flush=True,
    )
    return {"what": what, "name": name, "kind": kind.name, "us": seconds * 1e6, "floor_us": floor * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="decode,prefill,write", help="comma-separated groups")
    parser.add_argument("--tune", action="store_true", help="also try other tiles of the decode kernel")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    rows: list[dict[str, Any]] = []
    for group in args.only.split(","):
        if group not in ("decode", "prefill", "write"):
            parser.error(f"--only {group} is not known: use decode, prefill or write")
        rows += {
            "decode": lambda: bench_decode(args.tune), "prefill": bench_prefill, "write": bench_write
        }[group]()  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
