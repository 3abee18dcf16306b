"""How fast a sharded checkpoint loads, beside a plain read of the same files, and what memory that takes.

Writes a Llama of random weights (about `--gib`, bfloat16, `--shards` files) into `--folder` unless it is
there, then loads it `--runs` times from the disk (the page cache is told to forget the files) and from
memory, each time in a process of its own, just after two plain sequential reads (one thread, 8 MiB a
call): into one buffer, and into new memory for all, which any loader must get from the system. Memory is
the peak resident size during loading, less that of the process before it, over the parameters' size.
`--weights bfloat16` loads as stored, `float32` converts; `--device cuda` measures a GPU.

    python benchmarks/loading.py --folder /tmp/loading --gib 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, VOCAB = 2048, 8192, 64000
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN


def config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def write(folder: Path, gib: float, shards: int) -> None:
    """The checkpoint as `save_pretrained` lays it out, of tensors cut from one block of random numbers."""
    import torch
    from safetensors.torch import save_file

    from octavo.models.hf_config import model_config_from_folder
    from octavo.models.loading import targets_of
    from octavo.models.targets import canonical

    layers = max(1, round((gib * 2**30 / 2 - 2 * VOCAB * HIDDEN) / LAYER))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(layers)))
    shapes = canonical(targets_of(model_config_from_folder(folder)))
    block = torch.randn(VOCAB * HIDDEN).mul_(0.02).bfloat16()
    names = sorted(shapes)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        tensors = {n: block[: torch.Size(shapes[n]).numel()].view(shapes[n]).clone() for n in mine}
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(mine, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_read(files: list[Path], into_new: bool) -> float:
    """Seconds that a sequential read takes, into one buffer or into new memory for all."""
    piece, total = 8 << 20, sum(p.stat().st_size for p in files)
    buffer = memoryview(np.empty(total if into_new else piece, np.uint8))
    begin, at = time.perf_counter(), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer[at : at + piece]):
                at += count if into_new else 0
    return time.perf_counter() - begin


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def measure(folder: Path, dtype: str, device: str, threads: int, cold: bool) -> None:
    """Print one loading as JSON; runs in a process of its own."""
    import torch

    from octavo.models.loader import iterate_weights, load_model_config
    from octavo.models.loading import build_model, load_targets, load_weights
    from octavo.models.locate import find_model

    torch.set_num_threads(threads)
    source = find_model(str(folder))
    model_config = load_model_config(source)
    wanted = getattr(torch, dtype)
    model = build_model(model_config, dtype=wanted, device=device, attention_backend="torch")
    files = sorted(folder.glob("*.safetensors"))
    total = sum(p.stat().st_size for p in files)
    parameters = sum(p.nbytes for p in model.parameters())
    reads = []
    for into_new in (False, True):
        if cold:
            forget(files)
        reads.append(plain_read(files, into_new))
    if cold:
        forget(files)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    begin, begin_cpu = time.perf_counter(), time.process_time()
    targets = load_targets(model)
    weights = iterate_weights(source, model_config, targets, "auto", wanted, device, progress=False)
    load_weights(model, weights)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    print(
        json.dumps(
            {
                "plain_gb_s": total / reads[0] / 1e9,
                "new_gb_s": total / reads[1] / 1e9,
                "load_gb_s": total / seconds / 1e9,
                "ratio": reads[0] / seconds,
                "ratio_new": reads[1] / seconds,
                "cpu_s": time.process_time() - begin_cpu,
                "peak_over_weights": (status("VmHWM") - before) / parameters,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("cold", "warm"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        measure(args.folder, args.weights, args.device, args.threads, args.only == "cold")
        return
    if not (args.folder / "config.json").exists():
        write(args.folder, args.gib, args.shards)
    print(
        f"{'':6}{'plain GB/s':>11}{'to new GB/s':>12}{'load GB/s':>11}{'/ plain':>8}{'/ to new':>9}"
        f"{'cpu s':>7}{'peak/weights':>14}"
    )
    for only in ("cold", "warm"):
        command = [sys.executable, __file__, "--folder", str(args.folder), "--weights", args.weights]
        command += ["--device", args.device, "--threads", str(args.threads), "--only", only]
        for _ in range(args.runs):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            r = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{only:6}{r['plain_gb_s']:11.2f}{r['new_gb_s']:12.2f}{r['load_gb_s']:11.2f}"
                f"{r['ratio']:8.2f}{r['ratio_new']:9.2f}{r['cpu_s']:7.2f}{r['peak_over_weights']:14.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
