"""`octavo.eval` on the device: figures are those of the CPU, and two engines share it."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig
from octavo.eval.evaluate import EvalOptions, evaluate
from tests import tiny

pytestmark = pytest.mark.gpu

TEXTS = ["The quick brown fox jumps over the lazy dog. 今天天气很好，我们去公园散步吧。\n" * 6]


def config(device: str, **changes: object) -> EngineConfig:
    defaults = dict(dtype="float32", gpu_memory_utilization=0.5, num_threads=1)
    return EngineConfig(model=str(tiny.checkpoint("llama")), device=device, **{**defaults, **changes})


@pytest.mark.parametrize("rows", [None, 64, 1])
def test_two_engines_on_one_device_agree_exactly(rows):
    ours = config("cuda", max_num_batched_tokens=rows)
    found = evaluate(ours, TEXTS, EvalOptions(48), ours).summary
    assert found["kl_max"] == 0.0 and found["perplexity_ratio"] == 1.0


def test_the_device_against_the_cpu():
    found = evaluate(config("cuda"), TEXTS, EvalOptions(48), config("cpu")).summary
    assert found["kl_max"] < 1e-4 and found["perplexity_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_bfloat16_against_float32():
    found = evaluate(config("cuda", dtype="bfloat16"), TEXTS, EvalOptions(48), config("cuda")).summary
    assert 1e-7 < found["kl_mean"] < 1e-2
