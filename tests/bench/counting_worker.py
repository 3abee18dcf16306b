"""An engine for tests of the benchmark's processes: it counts. One with another name cannot be loaded."""

from __future__ import annotations

import sys
import types

from benchmarks.peers import worker


class Counting:
    def generate(self, prompts, lengths):
        return [list(range(n)) for n in lengths]


if __name__ == "__main__":
    module = types.ModuleType("benchmarks.peers.counting")
    module.load = lambda spec: Counting()
    sys.modules[module.__name__] = module
    worker.main(*sys.argv[1:])
