"""Building and loading the CPU kernels: once per machine, source and compiler, into a cache folder.

The library has a plain C interface and no undefined symbol: nothing of PyTorch's ABI enters it, and
its threads come from PyTorch's own OpenMP runtime, whose entry point is handed to it (a second
runtime would mean two pools of spinning threads on the same cores).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from octavo.kernels.cache_folder import cache_folder
from octavo.kernels.cpu.signatures import declare

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fopenmp-simd",  # only the loop hints: threads are the runtime's business, see above
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
BUILD_TIMEOUT = 900  # seconds for one file: a minute on a core of its own, many beside other work


class BuildError(RuntimeError):
    """The library could not be built or loaded; the message says why, in one line."""


def find_compiler() -> str:
    """Path of the C++ compiler: `$CXX`, else the first found of g++, clang++ and c++."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(
        f"no C++ compiler found (looked for {asked or ', '.join(COMPILERS)}): install g++ or set CXX"
    )


def _cpu_identity() -> str:
    """What `-march=native` depends on: the CPU's architecture and the features it reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "cpu family", "model")
    return platform.machine() + "".join(sorted({x for x in lines if x.split("\t")[0].strip() in wanted}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        lines = [x for x in (done.stderr or done.stdout).splitlines() if "error" in x.lower()]
        raise BuildError(f"{command[0]} failed: {lines[0].strip() if lines else f'exit {done.returncode}'}")
    return done.stdout


def library_path(compiler: str) -> Path:
    """Where the library for these sources, this compiler and this CPU is kept."""
    digest = hashlib.sha256()
    for part in (_run([compiler, "--version"]), " ".join(FLAGS), _cpu_identity()):
        digest.update(part.encode() + b"\0")
    for source in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache_folder("kernels") / digest.hexdigest()[:20] / "octavo_cpu.so"


def build() -> Path:
    """Returns the library's path, building it if it isn't there. Safe in several processes at once:
    each builds in a folder of its own, and a finished library takes its place in one rename."""
    compiler = find_compiler()
    target = library_path(compiler)
    if target.exists():
        return target
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    if not sources:
        raise BuildError(f"no sources in {SOURCE_DIR}: the package was installed without its .cpp files")
    # A warning, since programs show those unasked: otherwise the first run just stands still.
    logger.warning("building the CPU kernels, once for this machine: about a minute on few cores")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            objects = [str(Path(folder) / f"{x.stem}.o") for x in sources]
            _compile_all(compiler, [str(x) for x in sources], objects)
            library = str(Path(folder) / target.name)
            _run([compiler, "-shared", "-Wl,-z,defs", *objects, "-o", library])
            os.replace(library, target)
    except OSError as error:
        raise BuildError(
            f"cannot write the kernel cache {target.parent}: {error}; set OCTAVO_CACHE"
        ) from error
    return target


def _compile_all(compiler: str, sources: list[str], objects: list[str]) -> None:
    """Compiles all files at the same time (the largest alone takes most of the time)."""
    errors: list[BuildError] = []

    def compile_one(source: str, target: str) -> None:
        try:
            _run([compiler, *FLAGS, "-c", source, "-o", target])
        except BuildError as error:
            errors.append(error)

    jobs = [threading.Thread(target=compile_one, args=pair) for pair in zip(sources, objects, strict=True)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if errors:
        raise errors[0]


def _omp_parallel() -> ctypes.c_void_p:
    """Address of GOMP_parallel in the OpenMP runtime that PyTorch itself is linked to."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Looked up through PyTorch's library, so in whichever runtime *it* uses: other packages may
        # have brought further copies into the process.
        return ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError) as error:
        raise BuildError(f"PyTorch's OpenMP runtime offers no GOMP_parallel ({error})") from error


def load() -> ctypes.CDLL:
    """Builds if needed, loads, and connects the library to PyTorch's threads."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the CPU kernels are built on Linux only, this is {sys.platform}")
    parallel = _omp_parallel()
    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}; delete it to build it anew") from error
    declare(library)
    library.octavo_set_omp_parallel(parallel)
    return library
