"""How long tensor-parallel ranks take to load a checkpoint beside each other, and what is read of the disk.

Writes the checkpoint of `benchmarks/loading.py` into `--folder` unless it is there. Each rank is a process of
one thread, which begins when all are ready, and loads without repacking (work on what was read). Cold:
the page cache was told to forget the files. `--run-kib`: the least size of a run that is read apart from what
lies beside it (`octavo.models.read_ahead.LEAST_RUN`); with 4, so are the pieces of `down_proj`'s rows.

    python benchmarks/rank_loading.py --folder /tmp/loading --gib 1.5 --ranks 1 2 --run-kib 64 4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from loading import forget, status, write  # beside this file


def load(folder: Path, rank: int, size: int, least: int) -> None:
    """Load one rank's part once a line comes, and print what that took as JSON."""
    import torch

    from octavo.models import loading, weights
    from octavo.models.loader import iterate_weights, load_model_config
    from octavo.models.locate import find_model
    from octavo.parallel.state import TensorParallelGroup, use_group

    torch.set_num_threads(1)
    weights.LEAST_RUN = least
    loading._repack = lambda model: None
    source = find_model(str(folder))
    config = load_model_config(source)
    with use_group(TensorParallelGroup(rank, size)):
        model = loading.build_model(config, dtype=torch.bfloat16, device="cpu", attention_backend="torch")
    targets = loading.load_targets(model)
    print("ready", flush=True)
    sys.stdin.readline()
    before, begin, cpu = _disk_bytes(), time.perf_counter(), time.process_time()
    given = iterate_weights(source, config, targets, "auto", torch.bfloat16, "cpu", progress=False)
    loading.load_weights(model, given)
    found = {
        "seconds": time.perf_counter() - begin,
        "cpu": time.process_time() - cpu,
        "disk": (_disk_bytes() - before) / 1e9,
        "kept": sum(parameter.nbytes for parameter in model.parameters()) / 1e9,
        "peak": status("VmHWM") / 1e9,
    }
    print(json.dumps(found), flush=True)


def _disk_bytes() -> int:
    """What this process has made the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def together(folder: Path, size: int, least: int, cold: bool) -> list[dict[str, float]]:
    """What all ranks print."""
    command = [sys.executable, __file__, "--folder", str(folder), "--one", str(size), str(least)]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], **pipe) for rank in range(size)]  # type: ignore[call-overload]
    for rank in ranks:
        if rank.stdout.readline() != "ready\n":
            sys.exit("a rank did not start")
    if cold:
        forget(sorted(folder.glob("*.safetensors")))
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    return [json.loads(rank.communicate()[0]) for rank in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--run-kib", type=int, nargs="+", default=[64])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        size, least, rank = args.one
        load(args.folder, rank, size, least)
        return
    if not (args.folder / "config.json").exists():
        write(args.folder, args.gib, 4)
    names = ("ranks", "run KiB", "slowest s", "cpu s", "disk GB", "kept GB", "peak GB")
    print(f"{'':6}" + "".join(f"{name:>10}" for name in names))
    for cold in [True] * args.runs + [False] * args.runs:
        for size in args.ranks:
            for kib in args.run_kib if size > 1 else args.run_kib[:1]:
                found = together(args.folder, size, kib << 10, cold)
                slowest = max(rank["seconds"] for rank in found)
                sums = [sum(rank[key] for rank in found) for key in ("cpu", "disk", "kept", "peak")]
                figures = "".join(f"{figure:10.2f}" for figure in (slowest, *sums))
                print(f"{'cold' if cold else 'warm':6}{size:10}{kib:10}{figures}", flush=True)


if __name__ == "__main__":
    main()
