"""Copies of KV blocks between a device and the host: their rates, alone and beside decode steps.

Usage: python benchmarks/kv_copies.py [--model benchmarks/shapes/llama-8b] [--requests 32] [--json FILE]

First each way to copy (copy engines, the kernel) moves blocks of several sizes out and in, beside the bus's
own rate (one copy of one large piece) and with the time that telling the driver takes. Then a model with
random weights decodes, alone and while blocks are copied without pause; decode should lose at most 5%, and
the copies reach 80% of the bus.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.kernels.block_copy import BlockCopier
from octavo.kernels.cuda_block_copy import BatchedBlockCopier, driver_call
from octavo.sampling_params import SamplingParams
from octavo.step_messages import BlockCopies, BlockUpdate, StepPlan
from octavo.worker import host_cache
from octavo.worker.host_memory import HostMemory
from octavo.worker.worker import Worker

GIB = 1 << 30
# Name, layers, bytes of a layer's block: (K and V) x heads x 16 tokens x head size x bytes of a number.
PAGES = [
    ("Llama-8B bf16", 32, 64 << 10),
    ("Llama-8B fp8", 32, 32 << 10),
    ("Llama-2-7B bf16", 32, 256 << 10),
    ("Qwen3-0.6B bf16", 28, 64 << 10),
    ("Llama-8B int8", 32, (32 << 10) + 512),
    ("16 KiB pieces", 32, 16 << 10),
    ("SmolLM2-135M bf16", 30, 12 << 10),
]


def timed(work: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """(seconds until the device is done, seconds until the host is free again): medians."""
    stream = torch.cuda.Stream()
    total, host = [], []
    with torch.cuda.stream(stream):
        for _ in range(repeats + 1):
            stream.synchronize()
            begin = time.perf_counter()
            work()
            host.append(time.perf_counter() - begin)
            stream.synchronize()
            total.append(time.perf_counter() - begin)
    return statistics.median(total[1:]), statistics.median(host[1:])


def alone(num_bytes: int) -> list[dict[str, Any]]:
    """Rates of every way to copy `num_bytes`, by size of the pieces."""
    from octavo.kernels.triton.block_copy import KernelBlockCopier

    device = torch.device("cuda")
    memory = HostMemory(2 * num_bytes, device)
    rows = _bus(memory.tensor[:num_bytes], device)
    call = driver_call()
    rng = np.random.default_rng(0)
    for name, layers, piece in PAGES:
        count = num_bytes // (layers * piece)
        slots = memory.tensor[: 2 * count * layers * piece].view(2 * count, layers, piece)
        buffers = [torch.zeros(2 * count, piece, dtype=torch.uint8, device=device) for _ in range(layers)]
        copiers: list[BlockCopier] = [KernelBlockCopier(buffers, slots)]
        if call is not None:
            copiers.append(
                BatchedBlockCopier(buffers, slots, call, lambda: torch.cuda.current_stream().cuda_stream)
            )
        blocks, places = (rng.permutation(2 * count)[:count].astype(np.int32) for _ in range(2))
        for copier in copiers:
            for way, work in (
                ("out", functools.partial(copier.out, blocks, places)),
                ("in", functools.partial(copier.into, places, blocks)),
            ):
                seconds, host = timed(work)
                rate = count * layers * piece / seconds / 1e9
                rows.append(
                    {"pages": name, "by": copier.name, "way": way, "GB/s": rate, "host ms": host * 1e3}
                )
        del buffers, copiers
    memory.close()
    return rows


def _bus(host: torch.Tensor, device: torch.device) -> list[dict[str, Any]]:
    large = torch.zeros(len(host), dtype=torch.uint8, device=device)
    rows = []
    for way, to, source in (("out", host, large), ("in", large, host)):
        seconds, _ = timed(functools.partial(to.copy_, source, non_blocking=True))
        rows.append({"pages": "one piece", "by": "the bus", "way": way, "GB/s": len(host) / seconds / 1e9})
    return rows


class Decoding:
    """A worker whose requests decode, one token a step, with one step launched ahead on a GPU."""

    def __init__(self, args: argparse.Namespace):
        steps = (args.warmup + args.steps) * 4 + 400  # and until the last copies are through
        length = args.context + steps
        blocks = -(-length // 16)
        self.used = args.requests * blocks
        self.worker = Worker(
            EngineConfig(
                model=args.model,
                load_format="dummy",
                device=args.device,
                max_num_seqs=args.requests - (-2 * args.blocks // blocks),  # which limits the pool
                max_model_len=length,
                swap_space=args.swap_space,
                kv_cache_memory_bytes=args.kv_bytes,
                kv_cache_dtype=args.kv_cache_dtype,
                skip_tokenizer_init=True,
            )
        )
        if self.used + 2 * args.blocks > self.worker.facts.num_blocks:
            raise SystemExit(
                f"{self.worker.facts.num_blocks} blocks: give more --kv-bytes, or fewer --blocks"
            )
        params = SamplingParams(temperature=0.0, max_tokens=steps)
        first, _ = self.worker.first_step(
            np.ones(args.requests, np.int32), params, num_computed=args.context - 1
        )
        for i, admission in enumerate(first.admissions):
            ids = list(range(i * blocks, (i + 1) * blocks))
            admission.block_ids = [ids for _ in admission.block_ids]
        self.worker.execute(first).wait()
        self._depth = int(self.worker.facts.overlap)
        self._computed = args.context
        self._requests = args.requests
        self._in_flight: list[Any] = []

    def step(self, copies: list[BlockCopies]) -> list[int]:
        """Launch a step, take in one; returns the numbers of copies that ended."""
        n, none = self._requests, np.zeros(0, np.int32)
        plan = StepPlan(
            step_id=self._computed,
            admissions=[],
            block_updates=[BlockUpdate(none, none, none) for _ in self.worker.groups],
            slots=np.arange(n, dtype=np.int32),
            num_rows=np.ones(n, np.int32),
            start=np.full(n, self._computed, np.int32),
            samples=np.ones(n, bool),
            copies=copies,
        )
        self._computed += 1
        self._in_flight.append(self.worker.execute(plan))
        if len(self._in_flight) <= self._depth:
            return []
        result = self._in_flight.pop(0).wait()
        assert not result.copies_failed
        return result.copies_done

    def run(self, steps: int, copies: Iterator[BlockCopies] | None) -> tuple[list[float], int]:
        """Seconds of each step, and how many messages of copies ended; two are under way at any time."""
        times, ended, under_way = [], 0, 0
        for _ in range(steps):
            begin = time.perf_counter()
            more = [] if copies is None else [next(copies) for _ in range(2 - under_way)]
            done = len(self.step(more))
            under_way += len(more) - done
            ended += done
            times.append(time.perf_counter() - begin)
        while under_way:
            under_way -= len(self.step([]))
        return times, ended


def beside_decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of decode steps alone, and while blocks go out, in, and both ways."""
    if args.programs is not None:
        from octavo.kernels.triton import block_copy

        block_copy.OUT_PROGRAMS = block_copy.INTO_PROGRAMS = args.programs
    if args.way is not None:
        every = host_cache.HostCache._copiers
        patched = mock.patch.object(
            host_cache.HostCache, "_copiers", lambda *given: [c for c in every(*given) if c.name == args.way]
        )
        patched.start()
    decoding = Decoding(args)
    facts, tiers = decoding.worker.facts, decoding.worker.tiers
    assert tiers is not None
    print(", ".join(f"{name} {value}" for name, value in facts.summary.items()))
    rng, page, none = np.random.default_rng(0), tiers.host.page_bytes, np.zeros(0, np.int32)
    numbers = itertools.count()

    def messages(out: bool, into: bool) -> Iterator[BlockCopies]:
        while True:
            number = next(numbers)  # those of two that follow each other share no block and no slot
            unused = np.arange(decoding.used + number % 2, facts.num_blocks, 2, dtype=np.int32)
            blocks = rng.permutation(unused)
            slots = rng.permutation(np.arange(number % 2, facts.num_host_blocks, 2, dtype=np.int32))
            half = args.blocks // (out + into)
            o = (blocks[:half], slots[:half]) if out else (none, none)
            i = (slots[-half:], blocks[-half:]) if into else (none, none)
            yield BlockCopies(number, *o, *i)

    rows = []
    decoding.run(args.warmup, None)
    base, _ = decoding.run(args.steps, None)
    for name, out, into in (("out", True, False), ("in", False, True), ("both", True, True)):
        decoding.run(args.warmup, messages(out, into))
        times, ended = decoding.run(args.steps, messages(out, into))
        rows.append(
            {
                "copies": name,
                "step ms": statistics.mean(times) * 1e3,
                "alone ms": statistics.mean(base) * 1e3,
                "slower %": (statistics.mean(times) / statistics.mean(base) - 1) * 100,
                "p99 ms": float(np.quantile(times, 0.99)) * 1e3,
                "alone p99 ms": float(np.quantile(base, 0.99)) * 1e3,
                "GB/s": ended * (args.blocks // (out + into)) * (out + into) * page / sum(times) / 1e9,
            }
        )
        print(_line(rows[-1]))
    decoding.worker.close()
    return rows


def _line(row: dict[str, Any]) -> str:
    return "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(Path(__file__).parent / "shapes/llama-8b"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request before it decodes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=512, help="blocks of a message; two are under way")
    parser.add_argument("--swap-space", type=float, default=8.0, help="GiB")
    parser.add_argument("--kv-bytes", type=int, default=16 * GIB)
    parser.add_argument("--only", choices=("alone", "decode"))
    parser.add_argument("--way", choices=("kernel", "copy engines"), help="beside decode, not the chosen one")
    parser.add_argument("--programs", type=int, help="of the kernel, instead of its own number")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if args.only != "decode":
        results["alone"] = alone(GIB)
        for row in results["alone"]:
            print(_line(row))
    if args.only != "alone":
        results["beside decode"] = beside_decode(args)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
