"""A start with an empty cache on a GPU compiles no kernel itself: the process beside it has them ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny.models import checkpoint

pytestmark = pytest.mark.gpu

START = """
import json, sys
import triton
from octavo import LLM, SamplingParams

compiled, found = [], []

def listen(src, cache_hit, **_):
    (found if cache_hit else compiled).append(src.name)

triton.knobs.compilation.listener = listen
with LLM(model=sys.argv[1], device="cuda", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 26) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    llm.generate([list(range(5, 21))], params, use_tqdm=False)
print(json.dumps({"compiled": compiled, "found": found}))
"""


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "gemma3"])
def test_a_start_finds_its_kernels(family: str, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", START, str(checkpoint(family))],
        env={
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["found"]) > 10
    assert result["compiled"] == []
