"""What this machine is: processor, memory, GPUs, compiler, libraries. Detects, never decides.

Importing this module imports neither torch nor any other library that it reports on; only
`detect_gpus` imports torch, when it is called.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# Instruction sets by the flags that the Linux kernel reports for them; a set needs all its flags.
X86_SETS = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512_bf16": ("avx512_bf16",),
    "avx512_fp16": ("avx512_fp16",),
    "avx512_vnni": ("avx512_vnni",),
    "avx_vnni": ("avx_vnni",),
    "amx_bf16": ("amx_tile", "amx_bf16"),
    "amx_int8": ("amx_tile", "amx_int8"),
}
ARM_SETS = {
    "neon": ("asimd",),
    "dotprod": ("asimddp",),
    "fp16": ("asimdhp",),
    "bf16": ("bf16",),
    "i8mm": ("i8mm",),
    "sve": ("sve",),
}
MACOS_SETS = {
    "neon": "hw.optional.AdvSIMD",
    "dotprod": "hw.optional.arm.FEAT_DotProd",
    "fp16": "hw.optional.arm.FEAT_FP16",
    "bf16": "hw.optional.arm.FEAT_BF16",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
}
LIBRARIES = (
    "torch",
    "triton",
    "flashinfer-python",
    "numpy",
    "safetensors",
    "gguf",
    "tokenizers",
    "transformers",
    "msgspec",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "xxhash",
    "cbor2",
)


@dataclass(frozen=True)
class CpuInfo:
    """The processor.

    Attributes:
        model: its name as the system tells it.
        arch: x86_64, aarch64, …
        physical_cores, logical_cores: of the machine; `usable_cores` those this process may run on
            (affinity mask and cgroup quota).
        instruction_sets: those known to `X86_SETS` or `ARM_SETS` that it has; None where the system
            doesn't tell.
        numa_nodes: memory nodes, 1 where the system doesn't tell.
    """

    model: str
    arch: str
    physical_cores: int
    logical_cores: int
    usable_cores: int
    instruction_sets: tuple[str, ...] | None
    numa_nodes: int = 1

    def has(self, name: str) -> bool:
        """Whether the processor is known to have an instruction set."""
        return self.instruction_sets is not None and name in self.instruction_sets

    @property
    def fast_bfloat16(self) -> bool:
        """Whether the processor multiplies bfloat16 itself, so that it is faster than float32."""
        return any(self.has(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))

    @property
    def widens_bfloat16(self) -> bool:
        """Whether products of bfloat16 numbers are faster in float32, on numbers that are widened on the way.

        Intel's cores with AVX-512 bf16 begin a vdpbf16ps (64 operations) every second cycle, but two float32
        multiply-adds (32 each) in every one: measured on an Emerald Rapids without AMX, 87 against 179
        GFLOP/s a core. AMD's Zen 4 does twice as many in bfloat16, and AMX far more.
        """
        return self.has("avx512_bf16") and not self.has("amx_bf16") and "Intel" in self.model


@dataclass(frozen=True)
class MemoryInfo:
    """Host memory in bytes, as this process may use it: a cgroup's limit counts, not only the machine's."""

    total: int
    available: int
    limited_by_cgroup: bool = False


@dataclass(frozen=True)
class GpuInfo:
    """One visible NVIDIA GPU. Memory in bytes; `compute_capability` is (major, minor)."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    total_memory: int
    free_memory: int
    multiprocessors: int

    @property
    def bfloat16(self) -> bool:
        """Tensor cores multiply bfloat16 (Ampere, 8.0, and later)."""
        return self.compute_capability >= (8, 0)

    @property
    def fp8(self) -> bool:
        """Tensor cores multiply fp8 (Ada, 8.9, and later)."""
        return self.compute_capability >= (8, 9)


@dataclass(frozen=True)
class GpuReport:
    """The GPUs that torch can use, and in one sentence why there are none when there are none."""

    gpus: tuple[GpuInfo, ...]
    note: str | None = None
    cuda_version: str | None = None


@dataclass(frozen=True)
class CompilerInfo:
    """The C++ compiler that CPU kernels are built with."""

    path: str
    version: str


@dataclass(frozen=True)
class Hardware:
    """Everything that was found."""

    system: str
    python: str
    cpu: CpuInfo
    memory: MemoryInfo
    gpus: GpuReport
    compiler: CompilerInfo | None
    libraries: dict[str, str | None] = field(default_factory=dict)


def detect() -> Hardware:
    """Look at everything. Imports torch."""
    return Hardware(
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cpu=detect_cpu(),
        memory=detect_memory(),
        gpus=detect_gpus(),
        compiler=detect_compiler(),
        libraries=detect_libraries(),
    )


def detect_cpu() -> CpuInfo:
    """The processor, from the system's own tables."""
    import psutil

    arch = platform.machine().lower()
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch)
    logical = os.cpu_count() or 1
    if sys.platform == "darwin":
        model = _sysctl("machdep.cpu.brand_string") or platform.processor()
        sets = tuple(name for name, key in MACOS_SETS.items() if _sysctl(key) == "1") or None
    else:
        table = _read(Path("/proc/cpuinfo"))
        model = _cpuinfo_model(table) or platform.processor() or arch
        sets = _cpuinfo_sets(table)
    return CpuInfo(
        model=model,
        arch=arch,
        physical_cores=psutil.cpu_count(logical=False) or logical,
        logical_cores=logical,
        usable_cores=usable_cores(),
        instruction_sets=sets,
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
    )


def usable_cores() -> int:
    """Logical cores that this process may run on: its affinity mask, and its cgroup's quota rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def detect_memory() -> MemoryInfo:
    """Host memory, the tighter of the machine's and the cgroup's."""
    import psutil

    machine = psutil.virtual_memory()
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    used = _read(Path("/sys/fs/cgroup/memory.current")).strip()
    if not (limit.isdigit() and used.isdigit()) or int(limit) >= machine.total:
        return MemoryInfo(machine.total, machine.available)
    # The page cache counts as used in a cgroup, but is given back under pressure.
    reclaimable = 0
    for line in _read(Path("/sys/fs/cgroup/memory.stat")).splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file":
            reclaimable = int(value)
    free = max(0, int(limit) - int(used) + reclaimable)
    return MemoryInfo(int(limit), min(machine.available, free), limited_by_cgroup=True)


def detect_gpus() -> GpuReport:
    """NVIDIA GPUs that torch can use, `CUDA_VISIBLE_DEVICES` respected. Imports torch."""
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        note = "this PyTorch is a build without CUDA"
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            note += ", though an NVIDIA driver is installed: install PyTorch's CUDA build to use the GPU"
        return GpuReport((), note)
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        note = "no NVIDIA GPU or no driver is found" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r}"
        return GpuReport((), note, cuda)
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            GpuInfo(
                index=index,
                name=properties.name,
                compute_capability=(properties.major, properties.minor),
                total_memory=total,
                free_memory=free,
                multiprocessors=properties.multi_processor_count,
            )
        )
    return GpuReport(tuple(gpus), None, cuda)


def detect_compiler() -> CompilerInfo | None:
    """The compiler that the CPU kernels are built with, if there is one that answers."""
    from octavo.kernels.cpu.build import BuildError, find_compiler

    try:
        path = find_compiler()
    except BuildError:
        return None
    lines = _output([path, "--version"]).splitlines()
    return CompilerInfo(path, lines[0].strip()) if lines else None


def detect_libraries(names: tuple[str, ...] = LIBRARIES) -> dict[str, str | None]:
    """Installed versions by distribution name, None for what is absent. Imports none of them."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpuinfo_model(table: str) -> str | None:
    for line in table.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "cpu model", "hardware") and value.strip():
            return value.strip()
    return None


def _cpuinfo_sets(table: str) -> tuple[str, ...] | None:
    """Instruction sets that the first processor of a `/proc/cpuinfo` has; None if it lists no flags."""
    for line in table.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            known = X86_SETS if key.strip() == "flags" else ARM_SETS
            return tuple(name for name, needed in known.items() if flags.issuperset(needed))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _sysctl(key: str) -> str:
    return _output(["sysctl", "-n", key]).strip()


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
