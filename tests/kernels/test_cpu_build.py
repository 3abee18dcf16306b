"""Building and loading the CPU kernels: the cache, its races, and what happens without a compiler."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.cpu import build, ops

needs_kernels = pytest.mark.skipif(not ops.available(), reason=ops.why_not())
SOURCES = build.SOURCE_DIR


@pytest.fixture
def small_sources(tmp_path, monkeypatch):
    """Only the smallest source, so that a build takes a fraction of a second, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    # The threads need what they run again.
    for source in (*(SOURCES / f"{name}.cpp" for name in ("runtime", "record")), *SOURCES.glob("*.h")):
        shutil.copy(source, folder)
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def unloaded(monkeypatch):
    """The state of a process that has not asked for kernels yet."""
    monkeypatch.setattr(ops, "_lib", None)
    monkeypatch.setattr(ops, "_reason", None)


def test_where_there_is_a_compiler_there_are_kernels():
    """Else most tests of this folder would be skipped, and nobody would see why."""
    try:
        build.find_compiler()
    except build.BuildError:
        pytest.skip("no C++ compiler")
    assert ops.available(), ops.why_not()


@needs_kernels
def test_two_processes_build_at_once(small_sources):
    program = (
        "import sys; from pathlib import Path; from octavo.kernels.cpu import build;"
        "build.SOURCE_DIR = Path(sys.argv[1]); sys.stdin.readline(); print(build.build())"
    )
    root = str(SOURCES.parents[2])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(small_sources)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    paths = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(paths) == 1
    (path,) = (Path(x) for x in paths)
    assert [x.name for x in path.parent.iterdir()] == ["octavo_cpu.so"], "no temporary file may stay"
    assert path.stat().st_size > 1000


@needs_kernels
def test_a_build_is_announced_where_no_logging_is_set_up_and_only_then(small_sources):
    program = (
        "import sys; from pathlib import Path; from octavo.kernels.cpu import build;"
        "build.SOURCE_DIR = Path(sys.argv[1]); build.build()"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program, str(small_sources)], stderr=subprocess.PIPE, text=True, check=True
        ).stderr
        for _ in range(2)
    ]
    assert told[0].startswith("building the CPU kernels, once for this machine") and told[0].count("\n") == 1
    assert told[1] == ""


@needs_kernels
def test_library_is_reused_until_a_source_changes(small_sources):
    first = build.build()
    stamp = first.stat().st_mtime_ns
    assert build.build() == first and first.stat().st_mtime_ns == stamp
    (small_sources / "common.h").write_text((small_sources / "common.h").read_text() + "\n// changed\n")
    assert build.library_path(build.find_compiler()) != first


@needs_kernels
def test_broken_source_gives_one_line_naming_the_error(small_sources):
    (small_sources / "broken.cpp").write_text("int f() { return no_such_name; }\n")
    with pytest.raises(build.BuildError, match="no_such_name") as caught:
        build.build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [("OCTAVO_CPU_KERNELS", "0", "OCTAVO_CPU_KERNELS"), ("CXX", "no-such-compiler", "no-such-compiler")],
)
def test_absence_is_announced_once_with_its_reason(unloaded, monkeypatch, caplog, variable, value, reason):
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING):
        assert not ops.available()
        assert not ops.available()
    assert len(caplog.records) == 1
    assert reason in caplog.text and reason in ops.why_not() and "\n" not in ops.why_not()
    with pytest.raises(RuntimeError, match=reason):
        ops.load()


def test_unwritable_cache_is_a_build_error(small_sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="OCTAVO_CACHE|no C\\+\\+ compiler"):
        build.build()


@needs_kernels
def test_threads_are_those_of_pytorch():
    """One OpenMP runtime is mapped, ours links none, and no thread appears beside PyTorch's own.

    In a process of its own: libraries of other tests bring runtimes of theirs.
    """
    script = """
import os, torch
from octavo.kernels.cpu import norm_act
x, weight = torch.randn(512, 4096), torch.ones(4096)
torch.set_num_threads(2)
torch.nn.functional.silu(x)  # PyTorch starts its pool
threads = len(os.listdir("/proc/self/task"))
norm_act.rms_norm(x, weight, 1e-5)
assert len(os.listdir("/proc/self/task")) == threads
print(*{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mapped = done.stdout.splitlines()
    ours = next(x for x in mapped if x.endswith("octavo_cpu.so"))
    under_torch = str(Path(torch.__file__).parent.parent / "torch")
    assert [x for x in mapped if "libgomp" in x and not x.startswith(under_torch)] == []
    if shutil.which("ldd"):
        linked = subprocess.run(["ldd", ours], capture_output=True, text=True, check=True).stdout
        assert "gomp" not in linked and "libtorch" not in linked
