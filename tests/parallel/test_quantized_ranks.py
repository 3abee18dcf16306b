"""Quantized checkpoints and whole experts on two ranks: the whole engine gives one rank's tokens in float32.

Ranks are threads. What ranks make of each format's matrices is in `tests/quantization/test_ranks.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.models.locate import configured_model
from octavo.planning.plan import Layout, Planner
from tests import tiny
from tests.engine.test_llm_parity import expected, generate, make
from tests.parallel.test_tensor_parallel import CPU
from tests.parallel.thread_executor import thread_ranks  # noqa: F401 (a fixture)
from tests.quantization.checkpoints import FOLDER

pytestmark = pytest.mark.usefixtures("thread_ranks")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=1)
PROMPTS = [{"prompt_token_ids": [3 + (i * 37 + n) % 120 for i in range(n)]} for n in (5, 17, 30)]


def told(path: Path, ranks: int, **settings: Any) -> list[list[tuple[int, float]]]:
    """Greedy tokens and their log-probabilities."""
    with LLM(
        str(path), dtype="float32", device="cpu", num_threads=1, max_model_len=64, block_size=8,
        skip_tokenizer_init=True, kv_cache_memory_bytes=4 << 20, check_invariants=True,
        tensor_parallel_size=ranks, **settings,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [
        [(token, chances[token].logprob) for token, chances in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


def same(found: list[list[tuple[int, float]]], want: list[list[tuple[int, float]]]) -> None:
    for ours, theirs in zip(found, want, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        for (_, chance), (_, other) in zip(ours, theirs, strict=True):
            assert abs(chance - other) < 0.02  # another order of a sum may flip a code of 8 bits


@pytest.mark.parametrize(
    "name", ["awq", "gptq", "w4a16_asym", "w8a8", "fp8_static_kv", "fp8_block", "bnb_nf4_nested", "mixed"]
)
def test_quantized_checkpoints(name: str) -> None:
    same(told(FOLDER / name, 2), told(FOLDER / name, 1))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 1) for name in ("gptq_desc_act", "w4a16_asym", "fp8_static_kv", "bnb_nf4_nested")),
        *((name, 2) for name in ("awq", "w8a8", "mixed")),
    ],
)
def test_quantized_checkpoints_in_stages(name: str, ranks: int) -> None:
    same(told(FOLDER / name, ranks, pipeline_parallel_size=2), told(FOLDER / name, 1))


@pytest.mark.parametrize("name", ["gptq_desc_act", "actorder_group"])
def test_columns_in_act_order(name: str) -> None:
    """Expanded, so that no rounding of activations by other blocks is in it."""
    settings = dict(quantization="none")
    same(told(FOLDER / name, 2, **settings), told(FOLDER / name, 1, **settings))


@pytest.mark.parametrize("name", ["moe_fp8", "moe_w4a16"])
@pytest.mark.parametrize("whole", [False, True])
def test_quantized_experts(name: str, whole: bool) -> None:
    same(told(FOLDER / name, 2, enable_expert_parallel=whole), told(FOLDER / name, 1))


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_1"])
def test_gguf_files(qtype: str, tmp_path: Path) -> None:
    model = tiny.build("llama", intermediate_size=128)
    file = tiny.gguf_file("llama", tmp_path / "m.gguf", qtype, model=model)
    same(told(file, 2), told(file, 1))


@pytest.mark.parametrize("variant", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3"])
def test_whole_experts_equal_transformers(variant: str) -> None:
    with make(variant, tensor_parallel_size=4, enable_expert_parallel=True) as llm:
        assert generate(llm) == expected(variant)
        found, config = llm.facts.memory, llm.config
    plan = Planner(configured_model(config)).plan(config, CPU, Layout(tensor=4))
    for kind in ("weights", "kv_cache", "tables"):
        # oneDNN pads matrices of so few rows.
        assert plan.ledger.held[kind] == pytest.approx(found[kind], rel=0.02), kind


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "about"), [("awq", 0), ("moe_w4a16", 0), ("moe_fp8", 0), ("gptq_desc_act", 0.05)]
)
def test_the_ledger_is_the_planned_one(name: str, about: float, ranks: int) -> None:
    """How much columns in act order are filled up depends on the checkpoint."""
    with LLM(
        str(FOLDER / name), dtype="float32", device="cpu", num_threads=1, max_model_len=64,
        skip_tokenizer_init=True, kv_cache_memory_bytes=4 << 20, tensor_parallel_size=ranks,
        enable_expert_parallel=name == "moe_fp8",
    ) as llm:  # fmt: skip
        found, config = llm.facts.memory["weights"], llm.config
    plan = Planner(configured_model(config)).plan(config, CPU, Layout(tensor=ranks))
    assert plan.ledger.held["weights"] == pytest.approx(found, rel=about if ranks > 1 else 0)


def test_what_cannot_be_split_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"columns .* 32 share an entry: use a tensor_parallel_size that"):
        told(FOLDER / "w4a16", 4)
