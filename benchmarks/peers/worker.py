"""The process of one engine: `python -m benchmarks.peers.worker PEER SPEC`.

Reads one JSON object a line (`prompts`, `lengths`) and answers with `seconds` and `tokens`; first it tells
that the engine is ready. What libraries print goes to stderr. Standard library only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

from benchmarks.peers.engine import EngineSpec


def main(key: str, spec: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    engine = importlib.import_module(f"benchmarks.peers.{key}").load(EngineSpec(**json.loads(spec)))
    tell(ready=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        begin = time.perf_counter()
        tokens = engine.generate(wanted["prompts"], wanted["lengths"])
        seconds = time.perf_counter() - begin
        made = [len(ids) for ids in tokens]
        if made != wanted["lengths"]:
            raise SystemExit(f"asked for {wanted['lengths']} tokens, got {made}")
        tell(seconds=seconds, tokens=tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # some engines take seconds to fall apart
