"""What a KV cache of 8 bits must not change, and how little it may: for engines on any device."""

from __future__ import annotations

import torch

from octavo import LLM, SamplingParams
from tests import tiny
from tests.engine.closeness import SCORED, chosen, logprobs_of

KINDS = ["fp8", "fp8_e5m2", "int8"]
FAMILIES = ["llama", "qwen2", "gemma2"]  # plain; with biases (offsets); windows, caps and few KV heads
# Root mean square error of log-probabilities of tiny random models against an unquantized cache: a step of
# the format is 1/16, 1/8 and about 1/250 of a number, which these models multiply. Measured 0.17, 0.32 and
# 0.033 at most; plain PyTorch attention over the same codes gives the same six digits.
RMS = {"fp8": 0.3, "fp8_e5m2": 0.6, "int8": 0.06}
# Between ways to compute the same: sums that are rounded otherwise may move a number by a step.
SAME = 0.25


def make(variant: str, device: str, kind: str, **settings) -> LLM:
    """A tiny model's engine; with its tokenizer, on whose text FP8 keys are centred."""
    values = dict(
        model=str(tiny.checkpoint(variant)), dtype="float32", device=device, kv_cache_dtype=kind,
        max_model_len=tiny.CONTEXT, check_invariants=True, max_num_seqs=16,
        kv_cache_memory_bytes=8 << 20, block_size=8,
    ) | settings  # fmt: skip
    return LLM(**values)


def scores(llm: LLM) -> torch.Tensor:
    """Log-probabilities of all prompts' tokens, one after the other."""
    outputs = llm.generate(tiny.PROMPTS, SCORED, use_tqdm=False)
    return torch.cat([logprobs_of(o, p) for o, p in zip(outputs, tiny.PROMPTS, strict=True)])


def check_quality(variant: str, device: str, kind: str, **settings) -> None:
    """Log-probabilities against Transformers', with whole prompts, in chunks, after preemption."""
    want = torch.cat([chosen(tiny.logits(variant, p), p) for p in tiny.PROMPTS])
    with make(variant, device, kind, **settings) as llm:
        whole = scores(llm)
    error = float((whole - want).square().mean().sqrt())
    assert 1e-6 < error < RMS[kind], error  # 0 would be another cache than was asked for
    with make(variant, device, kind, max_num_batched_tokens=7, **settings) as llm:
        chunked = scores(llm)
    assert float((chunked - whole).square().mean().sqrt()) < SAME * error


def check_same_tokens(variant: str, device: str, kind: str, **settings) -> None:
    """A second pass over cached blocks says what the first said; so do requests that were preempted."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    with make(variant, device, kind, **settings) as llm:
        first, again = (
            [o.outputs[0].token_ids for o in llm.generate(tiny.PROMPTS, params, use_tqdm=False)]
            for _ in range(2)
        )
        assert llm.stats().prefix_cache_hits > 0
    assert again == first
    # Layers, parts, a rank's heads, tokens, a head's bytes.
    page = 3 * 2 * (2 // settings.get("tensor_parallel_size", 1)) * 8 * (16 + 2 * (kind == "int8"))
    few = sum(-(-len(prompt) // 8) for prompt in tiny.PROMPTS) + 4  # of 9 that answers need
    settings = {"kv_cache_memory_bytes": few * page, "look_ahead_admission": False} | settings
    with make(variant, device, kind, **settings) as llm:
        assert llm.stats().kv_blocks_total == few
        squeezed = [o.outputs[0].token_ids for o in llm.generate(tiny.PROMPTS, params, use_tqdm=False)]
        preempted = llm.stats().num_preemptions
    assert squeezed == first
    assert preempted > 0
