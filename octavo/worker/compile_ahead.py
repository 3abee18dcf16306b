"""The process that compiles kernels ahead: `python -m octavo.worker.compile_ahead`, for `KernelCompiler`.

Reads two lines of JSON: settings and stamp, then the GPU's facts. Writes a line when the kernels of a start's
first steps are in Triton's cache, and another when those of later steps are.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from octavo.config import EngineConfig


def main() -> int:
    """Do it; the exit code is 1 if something was not compiled."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # compilers write to theirs what they like
        first = json.loads(sys.stdin.readline())
        from octavo.kernels.triton.compile_pool import prepare_compiler

        ahead = threading.Thread(target=prepare_compiler, kwargs={"utilities": True})
        ahead.start()
        import octavo.worker.dry_worker  # noqa: F401 (PyTorch, while the thread hashes)

        facts = sys.stdin.readline()
        if not facts:
            return 1
        threading.Thread(target=_end_with_parent, daemon=True).start()
        ahead.join()
        return 0 if compile_all(first["config"], json.loads(facts), Path(first["stamp"]), out) else 1


def compile_all(config: dict[str, Any], facts: dict[str, Any], stamp: Path, out: TextIO) -> bool:
    """Compile all kernels that are foreseen; False if some could not be.

    Args:
        config: `EngineConfig`'s fields.
        facts: of `octavo.worker.pretended_gpu.gpu_facts`.
        stamp: written at the end.
        out: gets the two lines.
    """
    from octavo.kernels.triton import launch
    from octavo.kernels.triton.compile_pool import CompilePool, one_at_a_time
    from octavo.planning.hardware import usable_cores
    from octavo.worker.dry_worker import DryWorker
    from octavo.worker.pretended_gpu import pretended_gpu

    pool = CompilePool(10 * facts["major"] + facts["minor"], usable_cores())
    with one_at_a_time(), launch.instead_of_launches(pool.take), pretended_gpu(facts) as device:
        try:
            worker = DryWorker(EngineConfig(**config), device)
            for _ in worker.first_steps():
                pass
            _tell(out, pool)
            os.nice(10)  # from here on the engine is at work
            for _ in worker.later_steps():
                pass
        except Exception as error:  # a model whose steps ask for values: what was met before is compiled
            pool.errors.append(f"dry run: {type(error).__name__}: {error}".splitlines()[0])
        _tell(out, pool)
    if not pool.errors:
        with contextlib.suppress(OSError):  # then the next start looks again
            stamp.touch()
    return not pool.errors


def _tell(out: TextIO, pool: Any) -> None:
    pool.wait()
    begins = min((kernel.begin for kernel in pool.compiled), default=time.time())
    kernels = [[k.name, round(k.begin, 3), round(k.end, 3)] for k in pool.compiled]
    news = {"count": len(kernels), "seconds": round(time.time() - begins, 2), "errors": pool.errors}
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({**news, "kernels": kernels}), file=out, flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
