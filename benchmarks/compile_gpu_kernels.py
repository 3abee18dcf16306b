"""Compiles every Triton kernel for a GPU architecture on a machine that needs no GPU.

Usage: python benchmarks/compile_gpu_kernels.py [--capability 90] [--only paged_decode]

Calls the kernels' own wrappers on CPU tensors with a stand-in for the driver, so that what is
compiled is exactly what a launch would compile. Prints shared memory, registers and spills, and
which matrix instructions and asynchronous copies are in the code; ends with 1 if one fails, or if
there is a kernel that no case launches.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from compile_cases import cases
from compile_only import compile_only

from octavo.kernels import triton as kernels
from octavo.kernels.triton import attention, invariant_attention, moe
from octavo.kernels.triton.launch import Launcher

# Shared memory of a multiprocessor by compute capability: it decides between tiles.
_SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}


def _report(compiled: Any) -> str:
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([ptxas, "--dump-resource-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    regs, stack = found.groups() if found else ("?", "?")
    ptx = compiled.asm["ptx"]
    uses = {
        "wgmma": "wgmma.mma_async" in ptx,
        "mma": "mma.sync" in ptx,
        "cp.async": "cp.async.c" in ptx,
        "16B loads": ".v4.b32" in ptx or "0x10" in ptx,
    }
    return (
        f"shared {compiled.metadata.shared / 1024:6.1f} KiB, registers {regs:>3}, stack {stack:>3}, "
        f"warps {compiled.metadata.num_warps:2}: {' '.join(k for k, v in uses.items() if v)}"
    )


def _left_out(launched: set[str]) -> list[str]:
    """Kernels that are not among those that were launched."""
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    return sorted({launcher.kernel.__name__ for launcher in Launcher.all} - launched)


def main() -> int:
    """Compiles all cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--capability", type=int, default=90, help="compute capability, as 90 for 9.0")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    if args.capability not in _SHARED_KIB:
        parser.error(f"--capability {args.capability} is not known: use one of {sorted(_SHARED_KIB)}")
    compiled = compile_only(args.capability)
    attention.shared_memory = lambda device: _SHARED_KIB[args.capability] << 10
    invariant_attention.program_memory = lambda device: (_SHARED_KIB[args.capability] - 1) << 10
    moe._shared_memory = lambda device: (_SHARED_KIB[args.capability] - 1) << 10
    failures, launched = 0, set()
    for name, call in cases():
        if args.only not in name:
            continue
        compiled.clear()
        start = time.perf_counter()
        try:
            call()
        except Exception as error:
            failures += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")
            continue
        print(f"{name} ({time.perf_counter() - start:.1f} s)")
        launched.update(kernel_name for kernel_name, _ in compiled)
        for kernel_name, kernel in compiled:
            print(f"    {kernel_name.strip('_'):22} {_report(kernel)}")
    left_out = [] if args.only or failures else _left_out(launched)
    if left_out:
        print(f"no case launches {', '.join(left_out)}")
    return 1 if failures or left_out else 0


if __name__ == "__main__":
    sys.exit(main())
