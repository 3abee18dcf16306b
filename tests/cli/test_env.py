"""`octavo env` and `octavo pull --path`."""

from __future__ import annotations

import json

import psutil
import pytest

from octavo.cli import env
from octavo.cli.main import main
from octavo.kernels.cpu import build
from octavo.planning import hardware
from octavo.planning.capabilities import capabilities


def test_json_and_text_tell_the_same(capsys):
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["memory"]["total_bytes"] <= psutil.virtual_memory().total
    assert report["libraries"]["torch"]["version"]
    assert report["cpu"]["usable_cores"] >= 1
    text = env.render(report)
    assert report["cpu"]["model"] in text
    assert report["default_model"]["path"] in text
    for name in report["cpu"]["instruction_sets"] or ():
        assert name in text
    assert report["quantization"]["cpu"]["FP8_DYNAMIC"]["mode"] == "dequantized"
    assert "FP8_DYNAMIC       dequantized, since CPUs have no kernels for fp8" in text


def test_every_instruction_set_says_what_it_enables():
    assert set(env.CPU_SETS) == set(hardware.X86_SETS) | set(hardware.ARM_SETS)


def test_a_machine_without_compiler_is_told_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels = env._cpu_kernels()
    assert kernels["built"] is False
    assert "no-such-compiler" in kernels["note"]


def test_the_vector_width_follows_the_instruction_sets():
    cpu = hardware.detect_cpu()
    try:
        build.find_compiler()
    except build.BuildError:
        pytest.skip("no C++ compiler: nothing is built")
    assert env._cpu_kernels()["vector_floats"] == (16 if cpu.has("avx512") else 8 if cpu.has("avx2") else 4)


def test_gpus_are_described():
    gpu = hardware.GpuInfo(0, "NVIDIA H200", (9, 0), 150 * 2**30, 149 * 2**30, 132)
    described = env._gpu(gpu)
    assert (described["compute_capability"], described["fp8"]) == ("9.0", True)
    report = {**env.collect(), "gpus": [described]}
    assert "NVIDIA H200, compute capability 9.0" in env.render(report)
    assert "tensor cores for bfloat16 and fp8" in env.render(report)


def test_what_gpus_make_of_quantized_weights():
    ampere = hardware.GpuInfo(0, "NVIDIA A100", (8, 0), 80 * 2**30, 79 * 2**30, 108)
    told = capabilities((ampere,))
    assert list(told) == ["cpu", "cuda:0"]
    assert told["cuda:0"]["W4A16"].mode == "W4A16"
    assert str(told["cuda:0"]["FP8_BLOCK"]) == (
        "W8A16, since FP8 is multiplied from compute capability 8.9 on, NVIDIA A100 has 8.0"
    )


def test_pull_path_follows_the_cache_and_brings_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert main(["pull", "--path"]) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
