"""What this machine's devices make of each kind of quantized weights, for commands that tell of it."""

from __future__ import annotations

import importlib.util

from octavo.planning.hardware import GpuInfo
from octavo.quantization.capability import Hardware, Running, table


def gpu_hardware(gpu: GpuInfo) -> Hardware:
    """A GPU as the table of capabilities asks of it."""
    triton = importlib.util.find_spec("triton") is not None
    return Hardware("cuda", gpu.compute_capability, triton, gpu.name)


def cpu_hardware() -> Hardware:
    """This machine's CPU likewise; may build the CPU kernels."""
    from octavo.kernels.quant_ops import has_kernels  # which imports PyTorch

    return Hardware("cpu", kernels=has_kernels(), name="this CPU")


def capabilities(gpus: tuple[GpuInfo, ...]) -> dict[str, dict[str, Running]]:
    """By device ("cpu", "cuda:0", …) and by the names of methods: the mode that runs, and the reason where it
    is not the one that the method is named for."""
    found = {f"cuda:{gpu.index}": dict(table(gpu_hardware(gpu))) for gpu in gpus}
    return {"cpu": dict(table(cpu_hardware())), **found}
