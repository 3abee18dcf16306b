"""What a step's tensors take, by formula and as a worker on a CPU holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.kernels.cpu import ops as cpu_kernels
from octavo.models.locate import configured_model
from octavo.planning.machines import planned_machine
from octavo.planning.plan import Planner
from octavo.worker.model_runner import ModelRunner
from octavo.worker.worker import Worker
from tests import tiny


def check(model: Path, rows: int, plain_streams: int = 0, **settings: Any) -> None:
    """Compare what a step of many rows has lent its layers' tensors with the plan's.

    Args:
        plain_streams: tensors like the residual stream that PyTorch makes itself, which lie elsewhere.
    """
    if not cpu_kernels.available():
        pytest.skip("no CPU kernels")
    config = EngineConfig(
        model=str(model), device="cpu", max_num_seqs=40, max_num_batched_tokens=rows,
        kv_cache_memory_bytes=64 << 20, **settings,
    )  # fmt: skip
    plan = Planner(configured_model(config)).plan(config, planned_machine("cpu", None))
    worker = Worker(config)
    try:
        step, blocks = worker.largest_step(worker.facts.max_model_len)
        assert step.total_rows == rows and blocks <= worker.facts.num_blocks
        worker.execute(step).wait()
        assert isinstance(worker.runner, ModelRunner) and worker.runner._lending is not None
        lent = worker.runner._lending.memory.num_bytes
        lent += plain_streams * rows * plan.step.model.hidden_size * plan.step.itemsize
        assert plan.step.layers_bytes(rows) == pytest.approx(lent, rel=0.03)
    finally:
        worker.close()


@pytest.mark.parametrize("rows", [1024, 4096])
@pytest.mark.parametrize(
    "variant,plain_streams,settings",
    [
        ("llama-tied", 0, {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("qwen2", 1, {"dtype": "bfloat16"}),
        ("qwen3", 1, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ("gemma3", 1, {"quantization": "int8"}),
    ],
)
def test_layers_take_what_was_planned(variant: str, plain_streams: int, rows: int, settings: dict[str, Any]):
    check(tiny.checkpoint(variant), rows, plain_streams, **settings)


def test_layers_of_a_gguf_file_take_what_was_planned(tmp_path: Path):
    check(tiny.gguf_file("llama", tmp_path / "m.gguf", "Q4_0"), 2048)
