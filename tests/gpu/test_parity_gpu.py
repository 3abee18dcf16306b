"""The whole engine on a GPU against Transformers: float32 exactly, bfloat16 as close as Transformers' own."""

from __future__ import annotations

import os

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.layers import attention
from octavo.worker.input_batch import InputBatch
from tests import tiny
from tests.engine.closeness import SCORED, bfloat16_errors, chosen, logprobs_of

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo.kernels.triton import cascade  # noqa: E402 (defines kernels)

GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)


def make(variant: str, **settings) -> LLM:
    values = dict(
        device="cuda", max_model_len=tiny.CONTEXT, skip_tokenizer_init=True, check_invariants=True,
        max_num_seqs=16, kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=256,
    ) | settings  # fmt: skip
    return LLM(str(tiny.checkpoint(variant)), **values)


@pytest.mark.parametrize("variant", sorted(tiny.VARIANTS))
def test_float32_equals_transformers(variant):
    with make(variant, dtype="float32") as llm:
        outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
        scored = llm.generate(tiny.PROMPTS, SCORED, use_tqdm=False)
    for i, (prompt, output) in enumerate(zip(tiny.PROMPTS, outputs, strict=True)):
        assert output.outputs[0].token_ids == tiny.greedy(variant, i)
        want = chosen(tiny.logits(variant, prompt), prompt)
        torch.testing.assert_close(logprobs_of(scored[i], prompt), want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("variant", sorted(tiny.VARIANTS))
def test_bfloat16_is_as_close_as_transformers(variant):
    """Errors against float32 stay within 1.5 times those of Transformers' own bfloat16."""
    with make(variant, dtype="bfloat16") as llm:
        rms, rms_theirs = bfloat16_errors(llm, variant, "cuda")
    assert rms <= 1.5 * rms_theirs


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk, block_size", [(1, 16), (7, 8), (64, 32), (4096, 16)])
def test_chunks_blocks_and_overlap_change_nothing(chunk, block_size, overlap):
    settings = dict(max_num_batched_tokens=chunk, block_size=block_size, async_scheduling=overlap)
    with make("qwen3", dtype="float32", **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy("qwen3", i) for i in range(3)]
        assert llm.stats().prefix_cache_hits > 0


def test_preemption_changes_nothing():
    per_token = 3 * 2 * 2 * 16 * 4
    settings = dict(kv_cache_memory_bytes=200 * per_token, block_size=8, async_scheduling=True)
    with make("llama", dtype="float32", look_ahead_admission=False, **settings) as llm:
        outputs = llm.generate(tiny.PROMPTS[::-1], GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy("llama", i) for i in (2, 1, 0)]
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma2"])
def test_reading_a_shared_prompt_once_changes_no_token(variant, eager, monkeypatch):
    """In float32, while requests leave; and it was read once, at every length that was shared."""
    for name, value in [("BYTES", 0), ("REQUESTS", 3), ("TOKENS", 32)]:
        monkeypatch.setattr(attention, f"MIN_SHARED_{name}", value)
    hints: list[tuple[int, int]] = []
    launches: list[
        int
    ] = []  # of kernels by the host: in eager steps, and before and while a graph is recorded
    layout, attend_shared = InputBatch.layout, cascade.attend_shared

    def spy_layout(self, plan, *args):
        inputs = layout(self, plan, *args)
        hints.append((len(plan.slots), max(meta.shared_blocks for meta in inputs.meta)))
        return inputs

    def spy_attend(*args):
        launches.append(len(args[0]))
        attend_shared(*args)

    monkeypatch.setattr(InputBatch, "layout", spy_layout)
    monkeypatch.setattr(cascade, "attend_shared", spy_attend)
    head = [11 * i % 300 for i in range(100)]
    prompts = [{"prompt_token_ids": [*head[:n], i]} for i, n in enumerate((100, 100, 100, 70, 100, 100, 100))]
    params = [GREEDY.clone(max_tokens=n) for n in (60, 55, 50, 35, 20, 45, 10)]
    tokens, shared = {}, {}
    for off in (False, True):
        settings = dict(disable_cascade_attn=off, enforce_eager=eager, block_size=8)
        with make(variant, dtype="float32", **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens[off], shared[off] = [o.outputs[0].token_ids for o in outputs], set(hints)
        hints.clear()
        if not off:
            assert launches
            launches.clear()
    assert tokens[False] == tokens[True]
    assert not launches and not any(blocks for _, blocks in shared[True])
    assert {(7, 8), (3, 12), (2, 0)} <= shared[False]


def test_memory_is_what_the_settings_say():
    """The profile's cache leaves the share of memory that was asked for, within 2%."""
    from octavo.worker.memory import GIB

    free_before, total = torch.cuda.mem_get_info()
    with make(
        "llama", kv_cache_memory_bytes=None, gpu_memory_utilization=0.3, max_num_seqs=256, max_model_len=200
    ):
        used = total - torch.cuda.mem_get_info()[0]
    assert used < 0.3 * total + 0.02 * total
    torch.cuda.empty_cache()
    assert free_before - torch.cuda.mem_get_info()[0] < 2 * GIB


@pytest.mark.skipif("OCTAVO_SMOLLM2" not in os.environ, reason="OCTAVO_SMOLLM2 names no GGUF file")
def test_default_model_answers():
    with LLM(os.environ["OCTAVO_SMOLLM2"], device="cuda", gpu_memory_utilization=0.2) as llm:
        answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                          SamplingParams(temperature=0.0, max_tokens=30), use_tqdm=False)[0]  # fmt: skip
        print(answer.outputs[0].text)
        assert "Paris" in answer.outputs[0].text
