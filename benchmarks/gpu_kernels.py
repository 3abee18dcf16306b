"""Times each Triton kernel on the GPU against its floor: bytes over bandwidth, or operations over rate.

Usage: python benchmarks/gpu_kernels.py [--only decode] [--tune] [--json FILE]

Each figure is the median over replays of a CUDA graph that holds many calls over rotating inputs,
so that neither the launches nor the L2 cache enter. --tune tries other tile shapes and numbers of
splits for the attention kernels and the few-row product, and prints the best of each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from octavo.kernels.triton import activation, attention, cascade, linear, norm, rotary_kv, sampling

DTYPE = torch.bfloat16
L2_BYTES = 60 << 20


def measure(calls: list[Callable[[], Any]], replays: int = 7) -> float:
    """Seconds of one call: `calls` differ in their inputs and run one after another in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeat = max(1, 20 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / (repeat * len(calls)))
    return sorted(times[2:])[replays // 2]


def copies(bytes_each: int, most: int = 40) -> int:
    """How many input sets keep a working set several times the L2."""
    return max(2, min(most, 4 * L2_BYTES // max(bytes_each, 1) + 1))


class Table:
    """Collects and prints rows of (kernel, shape, time, floor)."""

    def __init__(self, bandwidth: float, rate: float):
        self.bandwidth, self.rate = bandwidth, rate
        self.rows: list[dict[str, Any]] = []

    def add(self, kernel: str, shape: str, seconds: float, moved: float, operations: float = 0.0) -> None:
        floor = max(moved / self.bandwidth, operations / self.rate)
        self.rows.append({"kernel": kernel, "shape": shape, "us": seconds * 1e6, "floor_us": floor * 1e6})
        unit = (
            f"{operations / seconds / 1e12:7.0f} TFLOP/s"
            if operations
            else f"{moved / seconds / 1e12:7.2f} TB/s"
        )
        print(
            f"{kernel:22} {shape:38} {seconds * 1e6:9.1f} us, floor {floor * 1e6:8.1f}, "
            f"x{seconds / floor:6.2f} {unit}",
            flush=True,
        )


def ceilings() -> tuple[float, float]:
    """Measured bytes/s of a large copy and FLOP/s of a large bf16 product."""
    a = torch.empty(1 << 30, dtype=torch.int8, device="cuda").random_()
    b = torch.empty_like(a)
    copy = 2 * a.numel() / measure([lambda: b.copy_(a)])
    x = torch.randn(8192, 8192, device="cuda").to(DTYPE)
    return copy, 2 * 8192**3 / measure([lambda: x @ x])


class Batch:
    """Requests over a paged cache in random block order, without the bookkeeping of an engine."""

    def __init__(
        self, rows: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int, block: int = 16
    ):
        counts = [-(-c // block) for c in contexts]
        order = torch.randperm(sum(counts), device="cuda", dtype=torch.int32)
        self.table = torch.zeros(len(rows), max(counts), dtype=torch.int32, device="cuda")
        used = 0
        for i, count in enumerate(counts):
            self.table[i, :count] = order[used : used + count]
            used += count
        self.cache = torch.randn(used, 2, kv_heads, block, dim, device="cuda", dtype=DTYPE)
        self.starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        self.q = torch.randn(sum(rows), heads, dim, device="cuda", dtype=DTYPE)
        self.out = torch.empty_like(self.q)
        self.rows, self.contexts, self.heads, self.kv_heads, self.dim = rows, contexts, heads, kv_heads, dim
        self.scale = dim**-0.5

    def decode(
        self,
        splits: int,
        max_context: int,
        config: attention.TileConfig | None = None,
        shared: attention.SharedPass | None = None,
    ) -> Callable[[], None]:
        n, max_rows = len(self.rows), max(self.rows)
        splits = splits or attention.choose_splits(n * self.kv_heads, max_context, multiprocessors())
        sizes = attention.decode_workspace_sizes(
            n, self.kv_heads, self.heads // self.kv_heads, self.dim, max_rows, splits
        )
        partials = torch.empty(sizes[0], device="cuda")
        counters = torch.zeros(sizes[1], dtype=torch.int32, device="cuda")
        return lambda: attention.paged_decode(
            self.q, self.cache, self.out, self.starts, self.lens, self.table, 0, n, max_rows, splits,
            partials, counters, self.scale, config=config, shared=shared,
        )  # fmt: skip

    def cascade(self, shared_tokens: int, max_context: int) -> Callable[[], None]:
        """Both launches; all requests begin with the first one's blocks."""
        n, group = len(self.rows), self.heads // self.kv_heads
        self.table[1:, : shared_tokens // self.cache.shape[3]] = self.table[
            0, : shared_tokens // self.cache.shape[3]
        ]
        tile = cascade.shared_config(
            n * group, group, self.dim, DTYPE, attention.shared_memory(self.q.device)
        )
        pieces = cascade.shared_splits(
            n, self.kv_heads, group, self.dim, max_context, multiprocessors(), tile
        )
        scratch = torch.empty(cascade.shared_workspace_size(n, self.heads, self.dim, pieces), device="cuda")
        length = torch.tensor([shared_tokens], dtype=torch.int32, device="cuda")
        shared = attention.SharedPass(length, n, pieces, scratch, tile, cascade.MIN_CHUNK)
        own = self.decode(0, max_context, shared=shared)

        def both() -> None:
            cascade.attend_shared(self.q, self.cache, self.starts, self.table, n, shared, self.scale)
            own()

        return both

    def prefill(self, config: attention.TileConfig | None = None) -> Callable[[], None]:
        return lambda: attention.paged_prefill(
            self.q, self.cache, self.out, self.starts, self.lens, self.table, 0, len(self.rows),
            sum(self.rows), self.scale, config=config,
        )  # fmt: skip

    def kv_bytes(self) -> int:
        return sum(self.contexts) * 2 * self.kv_heads * self.dim * self.q.element_size()

    def operations(self) -> int:
        pairs = sum(r * c - r * (r - 1) // 2 for r, c in zip(self.rows, self.contexts, strict=True))
        return 4 * pairs * self.heads * self.dim


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


LLAMA_8B, QWEN_06B = (32, 8, 128), (16, 8, 128)
DECODE_CASES = [
    ("1 request of 384, bound 384", LLAMA_8B, [384], 384),
    ("1 request of 384, bound 12288", LLAMA_8B, [384], 12288),
    ("1 request of 8192", LLAMA_8B, [8192], 8192),
    ("32 requests of 384, bound 12288", LLAMA_8B, [384] * 32, 12288),
    ("32 requests of 4096", LLAMA_8B, [4096] * 32, 4096),
    ("512 requests of 200..2000", LLAMA_8B, [200 + 1800 * i // 511 for i in range(512)], 2048),
    ("32 requests of 384 (16 heads)", QWEN_06B, [384] * 32, 12288),
    ("256 requests of 200..2000 (16 heads)", QWEN_06B, [200 + 1800 * i // 255 for i in range(256)], 2048),
]
# With the block table between, stages 3 and 4 hold one tile in flight, 5 and 6 two.
DECODE_TILES = [(32, 3, 2), (32, 5, 2), (64, 3, 2), (64, 3, 4), (64, 5, 4), (128, 3, 4), (128, 3, 8)]
PREFILL_TILES = [
    (128, 64, 3, 8), (128, 64, 5, 8), (128, 128, 3, 8), (128, 32, 3, 4), (128, 64, 3, 4), (64, 64, 3, 4),
    (64, 128, 3, 4),
]  # fmt: skip
PREFILL_CASES = [
    ("1 x 8192", LLAMA_8B, [8192], [8192]),
    ("1 x 2048 after 6144", LLAMA_8B, [2048], [8192]),
    ("16 x 512", LLAMA_8B, [512] * 16, [512] * 16),
    ("64 x 64 after 4096", LLAMA_8B, [64] * 64, [4160] * 64),
    ("1 x 8192 (16 heads)", QWEN_06B, [8192], [8192]),
]


def bench_decode(table: Table, tune: bool) -> None:
    for name, shape, contexts, bound in DECODE_CASES:
        bytes_each = sum(contexts) * 2 * shape[1] * shape[2] * 2
        batches = [Batch([1] * len(contexts), contexts, *shape) for _ in range(copies(bytes_each, 20))]
        seconds = measure([b.decode(0, bound) for b in batches])
        table.add("paged_decode", name, seconds, batches[0].kv_bytes())
        if not tune:
            continue
        tried = []
        default = attention.choose_splits(len(contexts) * shape[1], bound, multiprocessors())
        for block_n, stages, warps in DECODE_TILES:
            for splits in sorted({default, max(1, default // 2), min(64, default * 2)}):
                config = attention.TileConfig(0, block_n, stages, warps)
                try:
                    tried.append(
                        (measure([b.decode(splits, bound, config) for b in batches], 3), splits, config)
                    )
                except Exception as error:  # a tile that does not fit is an answer too
                    print(f"    {config}: {type(error).__name__}")
        for seconds, splits, config in sorted(tried, key=lambda t: t[0])[:4]:
            print(f"    {seconds * 1e6:8.1f} us: splits {splits} (default {default}), {config}")


def bench_cascade(table: Table) -> None:
    """Requests that share their beginning, without and with a pass of its own; the floor reads it once."""
    for name, shape, requests, shared, own in [
        ("64 of 4096 shared + 72", LLAMA_8B, 64, 4096, 72),
        ("64 of 4096 shared + 72 (16 heads)", QWEN_06B, 64, 4096, 72),
        ("8 of 4096 shared + 72", LLAMA_8B, 8, 4096, 72),
        ("256 of 512 shared + 500", LLAMA_8B, 256, 512, 500),
        ("16 of 512 shared + 200", LLAMA_8B, 16, 512, 200),
    ]:
        per_token = 2 * shape[1] * shape[2] * 2
        floor = (shared + requests * own) * per_token
        batches = [Batch([1] * requests, [shared + own] * requests, *shape) for _ in range(copies(floor, 10))]
        calls = [b.cascade(shared, 12288) for b in batches]
        table.add("paged_decode", name, measure([b.decode(0, 12288) for b in batches]), floor)
        table.add("attend_shared + decode", name, measure(calls), floor)


def bench_prefill(table: Table, tune: bool) -> None:
    for name, shape, rows, contexts in PREFILL_CASES:
        batch = Batch(rows, contexts, *shape)
        table.add("paged_prefill", name, measure([batch.prefill()]), batch.kv_bytes(), batch.operations())
        if len(rows) == 1 and rows == contexts:
            q, k, v = (
                torch.randn(1, h, rows[0], shape[2], device="cuda", dtype=DTYPE) for h in (shape[0],) * 3
            )
            run = measure([lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)])
            table.add("  PyTorch, contiguous", name, run, batch.kv_bytes(), batch.operations())
        if not tune:
            continue
        tried = []
        for block_m, block_n, stages, warps in PREFILL_TILES:
            config = attention.TileConfig(block_m, block_n, stages, warps)
            try:
                tried.append((measure([batch.prefill(config)], 3), config))
            except Exception as error:
                print(f"    {config}: {type(error).__name__}")
        for seconds, config in sorted(tried, key=lambda t: t[0])[:4]:
            print(
                f"    {seconds * 1e6:8.1f} us ({batch.operations() / seconds / 1e12:.0f} TFLOP/s): {config}"
            )


def bench_elementwise(table: Table) -> None:
    for rows, size in [(1, 4096), (32, 4096), (8192, 4096)]:
        n = copies(rows * size * 2)
        xs = [torch.randn(rows, size, device="cuda").to(DTYPE) for _ in range(n)]
        residuals = [torch.randn_like(x) for x in xs]
        weight = torch.randn(size, device="cuda").to(DTYPE)
        one = rows * size * 2
        plain = [functools.partial(norm.rms_norm, x, weight, 1e-5) for x in xs]
        table.add("rms_norm", f"{rows} x {size}", measure(plain), 2 * one)
        pairs = zip(xs, residuals, strict=True)
        calls = [functools.partial(norm.add_rms_norm, x, r, weight, 1e-5) for x, r in pairs]
        table.add("add_rms_norm", f"{rows} x {size}", measure(calls), 4 * one)
        wide = [
            torch.randn(rows, 2 * 14336, device="cuda").to(DTYPE) for _ in range(copies(rows * 14336 * 4))
        ]
        run = measure([lambda x=x: activation.silu_and_mul(x) for x in wide])
        table.add("silu_and_mul", f"{rows} x 14336", run, rows * 14336 * 6)
        del xs, residuals, wide
        for heads, kv_heads, dim, normed in [(32, 8, 128, False), (16, 8, 128, True)]:
            width = heads + 2 * kv_heads
            blocks = rows // 16 + 1
            sets = []
            for _ in range(copies(rows * width * dim * 2, 20)):
                qkv = torch.randn(rows, width, dim, device="cuda").to(DTYPE)
                cache = torch.empty(blocks, 2, kv_heads, 16, dim, device="cuda", dtype=DTYPE)
                sets.append((*qkv.split([heads, kv_heads, kv_heads], 1), cache))
            cos_sin = torch.randn(12288, dim, device="cuda")
            positions = torch.randint(0, 12288, (rows,), device="cuda")
            slots = torch.randperm(blocks * 16, device="cuda")[:rows]
            w = torch.randn(dim, device="cuda").to(DTYPE) if normed else None
            calls = [
                lambda q=q, k=k, v=v, c=c, s=slots, p=positions, t=cos_sin, w=w: (
                    rotary_kv.rotary_and_write_kv(q, k, v, t, p, c, s, w, w)
                )
                for q, k, v, c in sets
            ]
            moved = rows * dim * 2 * (2 * heads + 5 * kv_heads) + rows * dim * 4
            shape = f"{rows} x {heads}/{kv_heads} heads{', norms' if normed else ''}"
            table.add("rotary_and_write_kv", shape, measure(calls), moved)


def bench_sampling(table: Table) -> None:
    for rows, vocab in [(1, 128256), (32, 128256), (512, 128256), (256, 151936)]:
        for dtype in (torch.float32, DTYPE):
            size = rows * vocab * dtype.itemsize
            logits = [torch.randn(rows, vocab, device="cuda").to(dtype) for _ in range(copies(size, 20))]
            temperature = torch.full((rows,), 0.8, device="cuda")
            k0, k1 = (torch.randint(0, 2**32, (rows,), device="cuda") for _ in range(2))
            shape = f"{rows} x {vocab} {str(dtype)[6:]}"
            table.add("argmax", shape, measure([lambda x=x: sampling.argmax(x) for x in logits]), size)
            calls = [
                lambda x=x, t=temperature, a=k0, b=k1: sampling.gumbel_argmax(x, t, a, b) for x in logits
            ]
            table.add("gumbel_argmax", shape, measure(calls), size)
            del logits


def bench_linear(table: Table, tune: bool) -> None:
    shapes = [
        (4096, 6144),
        (4096, 4096),
        (4096, 28672),
        (14336, 4096),
        (4096, 128256),
        (1024, 4096),
        (3072, 1024),
    ]
    for (size_in, size_out), rows in itertools.product(shapes, (1, 2, 4)):
        size = size_in * size_out * 2
        weights = [torch.randn(size_out, size_in, device="cuda").to(DTYPE) for _ in range(copies(size, 20))]
        x = torch.randn(rows, size_in, device="cuda").to(DTYPE)
        shape = f"{rows} x {size_in} to {size_out}"
        table.add(
            "few_rows_linear",
            shape,
            measure([lambda w=w, x=x: linear.few_rows_linear(x, w) for w in weights]),
            size,
        )
        table.add("  cuBLAS", shape, measure([lambda w=w, x=x: F.linear(x, w) for w in weights]), size)
        if not tune or rows > 1:
            continue
        tried = []
        for config in itertools.product((1, 2, 4), (1024, 2048), (4, 8)):
            if config[1] > size_in or rows * config[0] * config[1] // config[2] > 4096:
                continue
            calls = [lambda w=w, x=x, c=config: linear.few_rows_linear(x, w, None, c) for w in weights]
            tried.append((measure(calls, 3), config))
        for seconds, config in sorted(tried)[:3]:
            print(
                f"    {seconds * 1e6:8.1f} us ({size / seconds / 1e12:.2f} TB/s): "
                f"outputs, inputs, warps {config}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", default="decode,cascade,prefill,elementwise,sampling,linear", help="comma-separated groups"
    )
    parser.add_argument("--tune", action="store_true", help="also try other tile shapes")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, rate = ceilings()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, bf16 {rate / 1e12:.0f} TFLOP/s")
    table = Table(bandwidth, rate)
    groups = args.only.split(",")
    if "decode" in groups:
        bench_decode(table, args.tune)
    if "cascade" in groups:
        bench_cascade(table)
    if "prefill" in groups:
        bench_prefill(table, args.tune)
    if "elementwise" in groups:
        bench_elementwise(table)
    if "sampling" in groups:
        bench_sampling(table)
    if "linear" in groups:
        bench_linear(table, args.tune)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"bandwidth": bandwidth, "rate": rate, "rows": table.rows}, file, indent=1)


if __name__ == "__main__":
    main()
