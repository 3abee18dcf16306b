"""How long `octavo quantize` takes for a large Llama on a GPU, and how much memory of the host.

Usage: python benchmarks/quantize_gpu.py [--shape benchmarks/shapes/llama-8b] [--scheme FP8_DYNAMIC]
       [--folder DIR] [--json FILE]

A checkpoint of the shape with random weights in bfloat16 is written first, in files of about 4 GB, to a
temporary folder, which needs room for it and for what is made of it; then the command runs as a process of
its own. The largest resident memory counts what the process maps of the files; anonymous memory does not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

FILE_BYTES = 4 << 30


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's tensors."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{at}self_attn.{name}_proj.weight", (rows * size, hidden)
        yield f"{at}self_attn.o_proj.weight", (hidden, heads * size)
        for name in ("gate", "up"):
            yield f"{at}mlp.{name}_proj.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)
        for name in ("input", "post_attention"):
            yield f"{at}{name}_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def write_checkpoint(shape: Path, folder: Path) -> int:
    """Random weights of a shape; returns their bytes."""
    folder.mkdir()
    shutil.copyfile(shape / "config.json", folder / "config.json")
    generator = torch.Generator("cuda").manual_seed(0)
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    total = held = 0

    def end_file() -> None:
        nonlocal held
        name = f"model-{len(set(weight_map.values())):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        tensors.clear()
        held = 0

    for name, sides in shapes(json.loads((shape / "config.json").read_text())):
        tensor = torch.empty(sides, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02, generator=generator)
        tensors[name] = tensor.cpu()
        total += tensor.nbytes
        held += tensor.nbytes
        if held >= FILE_BYTES:
            end_file()
    end_file()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class Watch(threading.Thread):
    """The largest memory of a process, in bytes: resident, and of that anonymous (which no file backs)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process = psutil.Process(pid)
        self.resident = self.anonymous = 0

    def run(self) -> None:
        while True:
            try:
                memory = self.process.memory_info()
            except psutil.Error:
                return
            self.resident = max(self.resident, memory.rss)
            self.anonymous = max(self.anonymous, memory.rss - memory.shared)
            time.sleep(0.05)


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", type=Path, default=here / "shapes/llama-8b")
    parser.add_argument("--scheme", default="FP8_DYNAMIC")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        source, target = Path(made) / "source", Path(made) / "quantized"
        begin = time.perf_counter()
        size = write_checkpoint(args.shape, source)
        print(f"{size / 1e9:.1f} GB written in {time.perf_counter() - begin:.1f} s", flush=True)
        torch.cuda.empty_cache()
        command = [
            "quantize",
            str(source),
            "--scheme",
            args.scheme,
            "--device",
            args.device,
            "-o",
            str(target),
        ]
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "octavo", *command, "--disable-tqdm"])
        watch = Watch(process.pid)
        watch.start()
        if process.wait() != 0:
            raise SystemExit(f"octavo quantize ended with {process.returncode}")
        found = {
            "shape": args.shape.name,
            "scheme": args.scheme,
            "device": args.device,
            "seconds": time.perf_counter() - begin,
            "resident_gb": watch.resident / 1e9,
            "anonymous_gb": watch.anonymous / 1e9,
            "written_gb": sum(p.stat().st_size for p in target.glob("*.safetensors")) / 1e9,
        }
    print(
        "{shape}, {scheme}: {seconds:.1f} s, {written_gb:.1f} GB written; host memory at most "
        "{resident_gb:.1f} GB resident, {anonymous_gb:.1f} GB of it anonymous".format(**found)
    )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
