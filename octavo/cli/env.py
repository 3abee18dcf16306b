"""`octavo env`: the hardware and libraries that were found, and what each enables; or a server's memory."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.planning.hardware import CpuInfo, GpuInfo

SUMMARY = "show the hardware and libraries found, and what each enables"

GIB = 2**30
PRODUCTS = "bfloat16 products in hardware (PyTorch's)"
NO_INT8 = "int8 products; nothing in this version uses them"
INT8 = "int8 products of the CPU kernels"
# Only what this version does with an instruction set.
CPU_SETS = {
    "avx2": "CPU kernels with vectors of 8 floats",
    "avx512": "CPU kernels with vectors of 16 floats",
    "avx512_bf16": f"{PRODUCTS} where they are faster than float32's",
    "avx512_fp16": "float16 products in hardware (PyTorch's)",
    "amx_bf16": PRODUCTS,
    "avx512_vnni": INT8,
    "avx_vnni": INT8,
    "amx_int8": NO_INT8,
    "neon": "CPU kernels with vectors of 4 floats",
    "bf16": PRODUCTS,
    "fp16": "float16 products in hardware (PyTorch's)",
    "dotprod": NO_INT8,
    "i8mm": NO_INT8,
    "sve": "nothing in this version",
}
LIBRARIES = {
    "torch": "tensors and matrix products",
    "triton": "GPU kernels",
    "transformers": "models that have no family of Octavo's own",
    "flashinfer-python": "nothing in this version",
    "uvloop": "a faster event loop for `octavo serve`",
    "httptools": "a faster HTTP parser for `octavo serve`",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print one JSON object (memory in bytes).")
    parser.add_argument(
        "--url",
        metavar="URL",
        help="Tell of a running server instead, such as http://127.0.0.1:8000: its memory by what holds it, "
        "as measured, and how its KV cache is used.",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="The server's key, if it asks for one. Default: OCTAVO_API_KEY."
    )


def run(args: argparse.Namespace) -> int:
    if args.url is not None:
        from octavo.cli.env_server import ask, render_server

        told = ask(args.url, args.api_key)
        print(json.dumps(told, indent=2) if args.json else render_server(told))
        return 0
    report = collect()
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def collect() -> dict[str, Any]:
    """Everything that the command tells, as JSON values; memory in bytes. May build the CPU kernels."""
    from octavo.models.pull import DEFAULT_MODEL, default_model_path, find_default
    from octavo.planning.capabilities import capabilities
    from octavo.planning.hardware import detect
    from octavo.version import __version__

    found = detect()
    memory, compiler = found.memory, found.compiler
    return {
        "octavo": __version__,
        "python": found.python,
        "system": found.system,
        "cpu": _cpu(found.cpu),
        "memory": {
            "total_bytes": memory.total,
            "available_bytes": memory.available,
            "limited_by_cgroup": memory.limited_by_cgroup,
        },
        "gpus": [_gpu(gpu) for gpu in found.gpus.gpus],
        "gpu_note": found.gpus.note,
        "cuda": found.gpus.cuda_version,
        "compiler": compiler and {"path": compiler.path, "version": compiler.version},
        "cpu_kernels": _cpu_kernels(),
        "quantization": {
            device: {name: {"mode": run.mode, "reason": run.reason} for name, run in methods.items()}
            for device, methods in capabilities(found.gpus.gpus).items()
        },
        "libraries": {
            name: {"version": version, "enables": LIBRARIES.get(name)}
            for name, version in found.libraries.items()
        },
        "default_model": {
            "name": DEFAULT_MODEL,
            "path": str(default_model_path()),
            "pulled": find_default() is not None,
        },
    }


def _cpu(cpu: CpuInfo) -> dict[str, Any]:
    sets = cpu.instruction_sets
    return {
        "model": cpu.model,
        "architecture": cpu.arch,
        "physical_cores": cpu.physical_cores,
        "logical_cores": cpu.logical_cores,
        "usable_cores": cpu.usable_cores,
        "numa_nodes": cpu.numa_nodes,
        "instruction_sets": None if sets is None else {name: CPU_SETS[name] for name in sets},
    }


def _gpu(gpu: GpuInfo) -> dict[str, Any]:
    major, minor = gpu.compute_capability
    return {
        "index": gpu.index,
        "name": gpu.name,
        "compute_capability": f"{major}.{minor}",
        "total_bytes": gpu.total_memory,
        "free_bytes": gpu.free_memory,
        "multiprocessors": gpu.multiprocessors,
        "bfloat16": gpu.bfloat16,
        "fp8": gpu.fp8,
    }


def _cpu_kernels() -> dict[str, Any]:
    """Whether this machine's CPU runs our kernels or plain PyTorch, and in the latter case why."""
    from octavo.kernels.cpu.build import BuildError, load

    try:
        library = load()
    except BuildError as error:
        return {"built": False, "vector_floats": None, "note": str(error)}
    return {"built": True, "vector_floats": library.octavo_vector_width(), "note": None}


def render(report: dict[str, Any]) -> str:
    """The report as text for a person."""
    cpu, memory = report["cpu"], report["memory"]
    lines = [
        _row("octavo", f"{report['octavo']} on Python {report['python']}, {report['system']}"),
        _row(
            "cpu",
            f"{cpu['model']}, {cpu['architecture']}: {cpu['physical_cores']} cores, "
            f"{cpu['logical_cores']} threads, {cpu['usable_cores']} usable by this process",
        ),
    ]
    if cpu["instruction_sets"] is None:
        lines.append(_row("", "the system doesn't tell its instruction sets"))
    lines += [_row(f"  {name}", use) for name, use in (cpu["instruction_sets"] or {}).items()]
    kernels = report["cpu_kernels"]
    lines.append(
        _row("cpu kernels", f"built, vectors of {kernels['vector_floats']} floats")
        if kernels["built"]
        else _row("cpu kernels", f"not built, plain PyTorch runs: {kernels['note']}")
    )
    compiler = report["compiler"]
    lines.append(
        _row(
            "c++ compiler",
            f"{compiler['version']} ({compiler['path']})" if compiler else "none found: install g++",
        )
    )
    limit = ", limited by the cgroup" if memory["limited_by_cgroup"] else ""
    lines.append(
        _row("memory", f"{_gib(memory['available_bytes'])} free of {_gib(memory['total_bytes'])}{limit}")
    )
    for gpu in report["gpus"]:
        has = [name for name in ("bfloat16", "fp8") if gpu[name]]
        lines.append(
            _row(
                f"gpu {gpu['index']}",
                f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['multiprocessors']} "
                f"multiprocessors, {_gib(gpu['free_bytes'])} free of {_gib(gpu['total_bytes'])}; "
                f"tensor cores for {' and '.join(has) or 'float16'}",
            )
        )
    if not report["gpus"]:
        lines.append(_row("gpu", f"none usable: {report['gpu_note']}"))
    for device, methods in report["quantization"].items():
        lines.append(_row("quantized weights", f"on {device}, by what checkpoints ask for:"))
        for name, run in methods.items():
            reason = f", since {run['reason']}" if run["reason"] else ""
            lines.append(_row(f"  {name}", f"{run['mode']}{reason}"))
    lines.append(_row("libraries", ""))
    for name, library in report["libraries"].items():
        use = f" ({library['enables']})" if library["enables"] else ""
        lines.append(_row(f"  {name}", f"{library['version'] or 'not installed'}{use}"))
    model = report["default_model"]
    state = "pulled" if model["pulled"] else "not pulled: `octavo pull` brings it"
    lines.append(_row("default model", f"{model['name']}, {model['path']} ({state})"))
    return "\n".join(lines)


def _row(name: str, value: str) -> str:
    return f"{name:<20}{value}".rstrip()


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"
