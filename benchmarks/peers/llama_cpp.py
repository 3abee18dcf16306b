"""llama.cpp through llama-cpp-python's bindings of its C interface.

The package's own `Llama` runs one request at a time; batches are decoded here as llama.cpp's examples do it:
one row of every sequence a step, greedy choice by NumPy. PyPI has the sources alone, and building the
package compiles much that is not measured; so CMake builds the library, with its defaults for this
processor, and the bindings are used from where they lie. A build that was cut short goes on where it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.engine import EngineSpec, Peer, Tokens

_PACKAGE, _VERSION = "llama-cpp-python", "0.3.36"
_UBATCH = 512
_FEWEST_SHARED = 32  # tokens of a common beginning that is computed once


def _build(folder: Path, run: Callable[..., None]) -> None:
    source = folder / "source"
    [*unpacked] = source.glob("llama_cpp_python-*/vendor/llama.cpp/CMakeLists.txt")
    if not unpacked:
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        # Only of this package: what builds it need not be built.
        only_this = ("-q", "--no-deps", "--no-binary", _PACKAGE, "-d", source)
        run("python", "-m", "pip", "download", *only_this, f"{_PACKAGE}=={_VERSION}")
        [archive] = source.glob("*.tar.gz")
        shutil.unpack_archive(archive, source)
        archive.unlink()
        [*unpacked] = source.glob("llama_cpp_python-*/vendor/llama.cpp/CMakeLists.txt")
    package = unpacked[0].parent.parent.parent / "llama_cpp"
    off = [f"-DLLAMA_BUILD_{x}=OFF" for x in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")]
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", *off]
    ninja = f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}"
    run("cmake", "-G", "Ninja", "-S", unpacked[0].parent, "-B", folder / "build", ninja, *options)
    run("cmake", "--build", folder / "build", "--target", "llama")
    (package / "lib").mkdir(exist_ok=True)
    for library in (folder / "build" / "bin").glob("lib*"):
        target = package / "lib" / library.name
        if not os.path.lexists(target):
            target.symlink_to(library)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "llama_cpp_source.pth").write_text(f"{package.parent}\n")


PEER = Peer(
    "llama_cpp",
    "llama.cpp",
    ("cmake", "ninja", "numpy>=1.20", "typing-extensions>=4.5", "diskcache>=5.6.1", "jinja2>=2.11.3"),
    ("16-bit", "Q8_0", "Q4_1"),
    f"llama-cpp-python {_VERSION}, its C interface; a common beginning is computed once and copied",
    build=_build,
)


class LlamaCppEngine:
    """A model, and a context for as many sequences of such lengths as the last call needed."""

    def __init__(self, spec: EngineSpec) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(spec.model.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {spec.model}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = spec.threads
        self._context: Any = None
        self._shape = (0, 0)
        self._batch: Any = None

    def _prepare(self, count: int, length: int) -> None:
        """A context of `count` sequences with room for `length` tokens each, and a batch for its rows."""
        lib, shape = self._lib, (count, -(-length // 256) * 256)
        if self._shape != shape:
            if self._context:
                lib.llama_free(self._context)
                lib.llama_batch_free(self._batch)
            params = lib.llama_context_default_params()
            params.n_ctx = shape[0] * shape[1]
            params.n_seq_max = count
            params.n_batch = 2048
            params.n_ubatch = _UBATCH
            params.n_threads = params.n_threads_batch = self._threads
            params.kv_unified = False
            self._context = lib.llama_init_from_model(self._model, params)
            self._batch = lib.llama_batch_init(2048, 0, 1)
            self._shape = shape
        lib.llama_memory_clear(lib.llama_get_memory(self._context), False)

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows (token, position, sequence, whether it is read); the likeliest token of each read."""
        import numpy

        chosen: list[int] = []
        for at in range(0, len(rows), 2048):
            part, batch = rows[at : at + 2048], self._batch
            batch.n_tokens = len(part)
            for i, (token, position, sequence, read) in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = read
            if code := self._lib.llama_decode(self._context, batch):
                raise SystemExit(f"llama_decode returned {code}")
            if reads := sum(row[3] for row in part):
                logits = self._lib.llama_get_logits(self._context)
                table = numpy.ctypeslib.as_array(logits, shape=(reads, self._vocab))
                chosen += table.argmax(axis=1).tolist()
        return chosen

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Tokens:
        self._prepare(len(prompts), max(len(p) + n for p, n in zip(prompts, lengths, strict=True)))
        common = len(os.path.commonprefix([tuple(p) for p in prompts])) if len(prompts) > 1 else 0
        if common >= _FEWEST_SHARED:
            self._decode([(token, at, 0, False) for at, token in enumerate(prompts[0][:common])])
            memory = self._lib.llama_get_memory(self._context)
            for sequence in range(1, len(prompts)):
                self._lib.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        else:
            common = 0
        rows = [
            (prompt[at], at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at in range(common, len(prompt))
        ]
        tokens: Tokens = [[token] for token in self._decode(rows)]
        while running := [s for s, made in enumerate(tokens) if len(made) < lengths[s]]:
            step = [(tokens[s][-1], len(prompts[s]) + len(tokens[s]) - 1, s, True) for s in running]
            for sequence, token in zip(running, self._decode(step), strict=True):
                tokens[sequence].append(token)
        return tokens


def load(spec: EngineSpec) -> LlamaCppEngine:
    return LlamaCppEngine(spec)
