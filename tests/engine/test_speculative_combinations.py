"""Every method beside all else that an engine does: the answers are those without drafts."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from octavo.structured_outputs import StructuredOutputsParams
from tests import tiny
from tests.engine.speculative_methods import METHODS, check_drafted, drafted
from tests.tiny.models import root

TEXTS = [
    "The quick brown fox. " * 4,
    "What is the capital of France?",
    "def add(a, b):\n    return a + b\n" * 2,
]
REQUESTS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(temperature=0.8, seed=1, n=3),
    dict(temperature=0.0, stop=["e", " a"], include_stop_str_in_output=True),
    dict(temperature=0.9, seed=2, stop=["th", "of", "1"]),
    dict(
        temperature=0.7, seed=3, structured_outputs=StructuredOutputsParams(regex=r"[a-e]{3}-\d{4}( x){2,9}")
    ),
    dict(temperature=0.0, frequency_penalty=1.5, bad_words=[" the", "a"]),
    dict(temperature=1.0, seed=4, min_tokens=10, logit_bias={2: 8.0}),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "one step after another": dict(async_scheduling=False),
    "overlapping steps": dict(async_scheduling=True),
    "chunks": dict(max_num_batched_tokens=9),
    "preemption": dict(kv_cache_memory_bytes=440 << 10, block_size=8, look_ahead_admission=False),
    "swap": dict(
        kv_cache_memory_bytes=440 << 10, block_size=8, look_ahead_admission=False, swap_space=0.01,
        async_scheduling=True,
    ),
    "no prefix cache": dict(enable_prefix_caching=False, enforce_eager=True),
    "fp8 keys and values": dict(kv_cache_dtype="fp8"),
    "int8 keys and values": dict(kv_cache_dtype="int8", max_num_batched_tokens=16),
    "Q4_1 weights": dict(quantization="Q4_1"),
}  # fmt: skip


@functools.cache
def gguf(qtype: str) -> Path:
    """The target as a GGUF file of quantized weights."""
    return tiny.gguf_file("llama", root() / f"llama-{qtype}.gguf", qtype)


def engine(method: str, name: str, most: int) -> LLM:
    settings = {"skip_tokenizer_init": False, **SETTINGS[name]}
    if (qtype := settings.pop("quantization", None)) is not None:
        # Read as they are stored and multiplied in float32, lest sums be rounded by the rows beside them.
        settings |= dict(model=str(gguf(qtype)), tokenizer=str(tiny.checkpoint("llama")), quantization="none")
    return drafted(method, most, **settings)


def answers(llm: LLM) -> list[RequestOutput]:
    """Of all requests for all texts, twice: the second time with what the prefix cache holds."""
    pairs = list(itertools.product(TEXTS, REQUESTS))
    params = [SamplingParams(max_tokens=30, **given) for _, given in pairs]
    texts = [text for text, _ in pairs]
    return [out for _ in range(2) for out in llm.generate(texts, params, use_tqdm=False)]


@functools.cache
def plain(name: str) -> list[RequestOutput]:
    with engine("", name, 0) as llm:
        return answers(llm)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_without_drafts(method: str, name: str):
    with engine(method, name, 5) as llm:
        outputs = answers(llm)
        check_drafted(llm)
        stats = llm.stats()
    if "kv_cache_memory_bytes" in SETTINGS[name]:
        assert stats.num_preemptions > 0
    if SETTINGS[name].get("enable_prefix_caching", True):
        assert stats.prefix_cache_hits > 0
    for output, want in zip(outputs, plain(name), strict=True):
        for choice, other in zip(output.outputs, want.outputs, strict=True):
            assert choice.token_ids == other.token_ids
            assert (choice.text, choice.finish_reason, choice.stop_reason) == (
                other.text, other.finish_reason, other.stop_reason
            )  # fmt: skip
    ends = {choice.finish_reason for output in outputs for choice in output.outputs}
    assert ends == {"stop", "length"}
    assert any(isinstance(c.stop_reason, str) for output in outputs for c in output.outputs)
