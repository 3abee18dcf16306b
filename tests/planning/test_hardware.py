"""Hardware detection: the parsers against tables of known machines, the rest against this one."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from octavo.planning import hardware

ZEN3 = "processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu sse2 fma f16c avx avx2 vaes\n"
SAPPHIRE_RAPIDS = (
    "model name : Intel(R) Xeon(R) Platinum 8480+\n"
    "flags : avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 avx_vnni "
    "amx_bf16 amx_tile amx_int8\n"
)
GRAVITON3 = "processor : 0\nFeatures : fp asimd asimdhp asimddp sve i8mm bf16\n"


@pytest.mark.parametrize(
    ("table", "model", "sets"),
    [
        (ZEN3, "AMD EPYC 7763", ("avx2",)),
        (
            SAPPHIRE_RAPIDS,
            "Intel(R) Xeon(R) Platinum 8480+",
            tuple(hardware.X86_SETS),
        ),
        (GRAVITON3, None, ("neon", "dotprod", "fp16", "bf16", "i8mm", "sve")),
        ("flags : avx2 fma\n", None, ()),  # f16c is missing: not the set that kernels are built for
        ("", None, None),
    ],
)
def test_cpuinfo(table, model, sets):
    assert hardware._cpuinfo_model(table) == model
    assert hardware._cpuinfo_sets(table) == sets


@pytest.mark.parametrize(
    ("model", "sets", "widens"),
    [
        ("Intel(R) Xeon(R) Processor", ("avx2", "avx512", "avx512_bf16"), True),
        ("Intel(R) Xeon(R) Processor", ("avx2", "avx512", "avx512_bf16", "amx_bf16"), False),
        ("Intel(R) Xeon(R) Processor", ("avx2", "avx512"), False),
        ("AMD EPYC 9R14", ("avx2", "avx512", "avx512_bf16"), False),
    ],
)
def test_where_bfloat16_products_are_slower_than_float32(model, sets, widens):
    cpu = hardware.CpuInfo(model, "x86_64", 2, 2, 2, sets)
    assert cpu.widens_bfloat16 is widens


def test_this_cpu_agrees_with_torch():
    import torch

    cpu = hardware.detect_cpu()
    assert 1 <= cpu.physical_cores <= cpu.logical_cores
    assert 1 <= cpu.usable_cores <= cpu.logical_cores
    assert cpu.model
    if cpu.arch == "x86_64" and cpu.instruction_sets is not None:
        assert cpu.has("avx2") == torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity masks")
def test_usable_cores_follow_the_affinity_mask():
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{one}])\n"
        "from octavo.planning.hardware import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_quota_of_a_cgroup_limits_the_cores(monkeypatch):
    files = {"/sys/fs/cgroup/cpu.max": "150000 100000\n"}
    monkeypatch.setattr(hardware, "_read", lambda path: files.get(str(path), ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert hardware.usable_cores() == 2
    files["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    assert hardware.usable_cores() == 64


def test_memory_of_a_cgroup(monkeypatch):
    gib = 2**30
    files = {
        "/sys/fs/cgroup/memory.max": str(2 * gib),
        "/sys/fs/cgroup/memory.current": str(gib),
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {gib // 2}\n",
    }
    monkeypatch.setattr(hardware, "_read", lambda path: files.get(str(path), ""))
    machine = type("M", (), {"total": 64 * gib, "available": 32 * gib})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert hardware.detect_memory() == hardware.MemoryInfo(2 * gib, 3 * gib // 2, limited_by_cgroup=True)
    files["/sys/fs/cgroup/memory.max"] = "max"
    assert hardware.detect_memory() == hardware.MemoryInfo(64 * gib, 32 * gib)


def test_libraries_without_importing_them():
    code = (
        "import sys\nfrom octavo.planning.hardware import detect_libraries\n"
        "found = detect_libraries(('torch', 'no-such-library-of-ours'))\n"
        "print(bool(found['torch']), found['no-such-library-of-ours'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "None", "False"]


def test_compiler_of_cxx(monkeypatch, tmp_path):
    compiler = tmp_path / "mycxx"
    compiler.write_text("#!/bin/sh\necho 'mycxx 1.2'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert hardware.detect_compiler() == hardware.CompilerInfo(str(compiler), "mycxx 1.2")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert hardware.detect_compiler() is None


def test_gpus_or_the_reason_why_none():
    report = hardware.detect_gpus()
    assert bool(report.gpus) != bool(report.note)
    for gpu in report.gpus:
        assert 0 < gpu.free_memory <= gpu.total_memory


@pytest.mark.parametrize(("capability", "bfloat16", "fp8"), [((7, 5), False, False), ((8, 9), True, True)])
def test_what_a_gpu_has(capability, bfloat16, fp8):
    gpu = hardware.GpuInfo(0, "GPU", capability, 1, 1, 1)
    assert (gpu.bfloat16, gpu.fp8) == (bfloat16, fp8)
