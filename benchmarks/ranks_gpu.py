"""How long sums over two GPUs take inside a replayed graph, by rows and way; and whole engines on two GPUs.

    python benchmarks/ranks_gpu.py [--size 4096] [--json FILE]
    python benchmarks/ranks_gpu.py --rows tp2,pp2 [--json FILE]

The first prints microseconds of one sum, each rank's graph having 64 of them: NCCL's, the kernel over peer
memory, either with the residual addition and the norm that follow; and the choice of a token among ranks.
Expected on H200s: 8 KiB 3 to 5 µs (a kernel 1.1, writing to the other GPU and seeing it 2 to 3), 4 MiB 15
(NVLink's 353 GB/s take 12); NCCL 10 to 15 and 50. With `--rows` whole engines are measured instead, by the
commands of benchmarks/ranks_rows.json (as `benchmarks/gpu.py --table` does).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import torch

from octavo.parallel.process_group import choose_rank_device, join_ranks

ROWS = (1, 2, 8, 32, 64, 128, 256, 512, 2048, 8192)
CALLS, REPLAYS = 64, 30


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of many calls, after one outside it, which compiles."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, meet: Callable[[], Any]) -> float:
    """Median of one call."""
    times = []
    for n in range(REPLAYS + 3):
        meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the ranks start together only after one
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if n >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def measure(rank: int, size: int, rendezvous: str, results: Any) -> None:
    """One rank's process."""
    device = choose_rank_device("cuda", rank, 2)
    group = join_ranks(rank, 2, 1, rendezvous, device, 60.0).tensor
    plain = join_plain(group)
    group.join_peers(device, few_rows=True, any_rows=True)
    found: dict[str, dict[int, float]] = {}
    with torch.inference_mode():
        weight = torch.ones(size, dtype=torch.bfloat16, device=device)
        for rows in ROWS:
            x = torch.randn(rows, size, device=device).bfloat16()
            residual = torch.randn_like(x)
            logits = torch.randn(min(rows, 512), 64128, device=device).bfloat16()
            cases: dict[str, Callable[[], Any]] = {
                "NCCL": lambda x=x: plain.all_reduce(x),
                "NCCL, add and norm": lambda x=x, r=residual: plain.add_rms_norm(x, r, weight, 1e-5),
                "peers": lambda x=x: group.all_reduce(x),
                "peers, add and norm": lambda x=x, r=residual: group.add_rms_norm(x, r, weight, 1e-5),
                "NCCL, token of 128256": lambda v=logits: plain.argmax(v, 64128 * rank),
                "peers, token of 128256": lambda v=logits: group.argmax(v, 64128 * rank),
            }
            if rows > 512:  # no graph has so many
                cases = {name: call for name, call in cases.items() if "token" not in name}
            for name, call in cases.items():
                x.zero_()
                found.setdefault(name, {})[rows] = microseconds(graph_of(call), lambda: group.minimum(0))
    if rank == 0:
        results.put((group.transport, found))
    group.minimum(0)
    os._exit(0)


def join_plain(group: Any) -> Any:
    """The same ranks, which add up through NCCL alone."""
    return type(group)(group.rank, group.size, group._group)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096, help="elements of a row, bfloat16")
    parser.add_argument("--rows", help="comma-separated beginnings of ids in benchmarks/ranks_rows.json")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("this needs two GPUs", file=sys.stderr)
        return 1
    # NVLink's multicast is not used, and stays off where it is not to be touched.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if args.rows is not None:
        table = str(Path(__file__).parent / "ranks_rows.json")
        gpu.main(["--table", table, "--rows", args.rows, *(["--json", str(args.json)] if args.json else [])])
        return 0
    spawn = torch.multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    with tempfile.NamedTemporaryFile() as rendezvous:
        given = (args.size, rendezvous.name, results)
        processes = [spawn.Process(target=measure, args=(rank, *given)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        return 1
    transport, found = results.get()
    print(f"µs of one sum over 2 ranks, rows of {args.size} bfloat16; {transport}")
    print(f"{'rows':26}" + "".join(f"{rows:>8}" for rows in ROWS))
    for name, times in found.items():
        print(f"{name:26}" + "".join(f"{times[rows]:8.2f}" for rows in ROWS if rows in times))
    if args.json is not None:
        args.json.write_text(json.dumps({"transport": transport, "microseconds": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
