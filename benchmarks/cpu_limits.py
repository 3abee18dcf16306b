"""What the machine allows: memory read and matrix products as measured, and the floors that follow."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass

from benchmarks.cpu_work import Request, Sizes, cpu_work

_SIDE = 2048
_REPEATS = 5
_LONG = 0.2  # seconds of one product


@dataclass(frozen=True)
class Shape:
    """The default model, as far as floors need it."""

    layers: int = 30
    hidden: int = 576
    body: int = 106_168_320  # weights of the layers' matrices, each read once a step and used by every row
    head: int = 28_311_552  # weights of the head, used by rows that are sampled

    def operations(self, requests: list[Request], shared: int = 0) -> float:
        """Multiplications and additions that the requests need, their first `shared` tokens computed once."""
        total = 0.0
        for number, (prompt, made) in enumerate(requests):
            begin, end = (shared if number else 0), len(prompt) + made - 1
            total += 2.0 * self.body * (end - begin) + 2.0 * self.head * made
            total += (
                2.0 * self.layers * self.hidden * (end * end - begin * begin)
            )  # scores and values, causal
        return total


def measure_limits(threads: int) -> dict[str, float]:
    """Bytes read a second, and operations a second of matrix products by type; the best of some runs."""
    import torch

    from octavo.bench.bandwidth import read_bandwidth

    torch.set_num_threads(threads)
    limits = {"read": read_bandwidth("cpu")}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.int8)):
        limits[name] = 0.0
        for side in (_SIDE // 8, _SIDE // 4, _SIDE // 2, _SIDE):
            a = torch.ones(side, side).to(dtype)
            multiply = torch._int_mm if dtype == torch.int8 else torch.mm
            for _ in range(_REPEATS):
                begin = time.perf_counter()
                multiply(a, a)
                took = time.perf_counter() - begin
                limits[name] = max(limits[name], 2.0 * side**3 / took)
            if took > _LONG:
                break  # without a fast path the next would take minutes, and is no floor
    return limits


def describe_machine(threads: int) -> str:
    """One line: processor, instruction sets, cores, memory."""
    import psutil

    from octavo.planning.hardware import detect_cpu

    cpu = detect_cpu()
    sets = ", ".join(cpu.instruction_sets or ()) or "none known"
    return (
        f"{cpu.model or platform.machine()}, {cpu.physical_cores} physical cores ({threads} threads used), "
        f"vector instructions: {sets}; {psutil.virtual_memory().total / 1e9:.0f} GB of memory"
    )


def floors(
    limits: dict[str, float], weight_bytes: dict[str, float], sizes: Sizes
) -> dict[str, dict[str, float]]:
    """The highest rates (single, batch: tokens/s) and least times (prefill, shared: s) by row and format."""
    shape, work = Shape(), {row: variants[1] for row, variants in cpu_work(sizes).items()}
    wide = max(limits["float32"], limits["bfloat16"])
    found: dict[str, dict[str, float]] = {row: {} for row in ("single", "prefill", "batch", "shared")}
    for name, size in weight_bytes.items():
        rate = wide if name == "16-bit" else max(wide, limits["int8"])
        found["single"][name] = limits["read"] / size
        found["prefill"][name] = shape.operations(work["prefill"]) / rate
        made = sum(n for _, n in work["batch"])
        found["batch"][name] = made * rate / shape.operations(work["batch"])
        found["shared"][name] = shape.operations(work["shared"], sizes.prefix) / rate
    return found


def weight_bytes() -> dict[str, float]:
    """Bytes of the weights that a decode step reads, by format."""
    import gguf

    from octavo.models.pull import pull_default

    tensors = gguf.GGUFReader(pull_default()).tensors
    count = Shape().body + Shape().head
    return {"16-bit": 2.0 * count, "int8": 1.0 * count, "Q4_1": float(sum(int(t.n_bytes) for t in tensors))}
