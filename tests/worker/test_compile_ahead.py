"""Kernels compiled ahead: those foreseen are those launched, and what is compiled is what a launch finds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.worker import kernel_compiler
from tests.tiny.models import checkpoint

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def run(*args: str, **env: str) -> str:
    """Standard output of a Python process, in which Triton compiles."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *args],
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
def test_what_a_start_launches_is_foreseen() -> None:
    families = ("llama", "gemma3", "deepseek-v2", "llama=fp8", "llama=int8", "llama=ranks", "gemma3=ranks")
    models = [name.partition("=") for name in families]
    folders = [f"{checkpoint(name)}{equals}{quantization}" for name, equals, quantization in models]
    lines = run("-m", "tests.worker.kernel_variants", *folders)
    for family, line in zip(families, lines.splitlines(), strict=True):
        found = json.loads(line)
        assert len(found["launched"]) > 20, family
        assert found["foreseen"] == found["launched"], family
        assert any("_sum_kernel" in one for one in found["launched"]) == family.endswith("ranks")


COMPILE = """
import json
import torch, triton
from octavo.kernels.triton import launch, norm
from octavo.kernels.triton.compile_pool import CompilePool

def call():
    for size in (64, 128, 128):
        norm.rms_norm(torch.empty(3, size), torch.empty(size), 1e-6)
    norm.layer_norm(torch.empty(3, 64), torch.empty(64), None, 1e-6)

pool = CompilePool(90, 2)
with launch.instead_of_launches(pool.take):
    call()
    pool.wait()
    call()
found = []
triton.knobs.compilation.listener = lambda src, cache_hit, **_: found.append([src.name, cache_hit])
for kernel in (norm._rms_norm_kernel, norm._layer_norm_kernel):
    kernel.device_caches.clear()
launched = triton.runtime.jit.JITFunction.run

def compile_only(*args, **given):
    launched(*args, **{**given, "warmup": True})

triton.runtime.jit.JITFunction.run = compile_only
call()
print(json.dumps({"compiled": sorted(k.name for k in pool.compiled), "errors": pool.errors, "found": found}))
"""


@needs_triton
def test_a_launch_finds_what_the_pool_compiled(tmp_path: Path) -> None:
    result = json.loads(run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path)))
    assert result["errors"] == []
    assert result["compiled"] == ["_layer_norm_kernel", "_rms_norm_kernel", "_rms_norm_kernel"]
    assert {name for name, _ in result["found"]} == set(result["compiled"])
    assert all(hit for _, hit in result["found"])


@needs_triton
def test_a_compiler_that_fails_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    stamp = tmp_path / "stamp"
    compiler = kernel_compiler.KernelCompiler(
        EngineConfig(model=str(tmp_path / "none"), device="cuda"), stamp
    )
    compiler.begin({"name": "NVIDIA H200", "major": 9, "minor": 0, "index": 0})
    compiler.wait()  # for the line that says so
    compiler.close()
    compiler.close()
    assert not stamp.exists()


def test_a_compiler_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_compiler, "_PATIENCE", 0.2)
    compiler = kernel_compiler.KernelCompiler(EngineConfig(model="none"), tmp_path / "stamp")
    compiler.wait()  # it awaits `begin`
    assert compiler._process.poll() is not None


class Started:
    """In the place of the process."""

    def __init__(self, config: EngineConfig, stamp: Path):
        self.stamp = stamp


def start(**settings: Any) -> Any:
    return kernel_compiler.start_compiler(EngineConfig(**{"model": "none", "device": "auto", **settings}))


@needs_triton
def test_where_a_compiler_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_compiler, "KernelCompiler", Started)
    monkeypatch.setattr(kernel_compiler, "_DRIVERS", (str(tmp_path / "no driver"),))
    assert start() is None
    monkeypatch.setattr(kernel_compiler, "_DRIVERS", (str(tmp_path),))
    assert start(device="cpu") is None
    first = start().stamp
    assert first.parent == tmp_path
    assert start().stamp == first
    assert start(max_num_seqs=3).stamp != first
    first.touch()  # as the process does at its end
    assert start() is None
    assert start(max_num_seqs=3) is not None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert start(max_num_seqs=3) is None


def test_settings_reach_the_process(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), max_num_seqs=3)
    assert EngineConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
