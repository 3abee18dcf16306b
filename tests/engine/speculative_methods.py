"""Every method of drafting for a tiny target, such that some drafts are right and some are not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kv.pool import BlockPool
from octavo.messages import CoreStats
from octavo.outputs import RequestOutput
from octavo.worker.worker import Worker
from tests import tiny
from tests.engine.test_llm_parity import make
from tests.tiny import eagle3, pard
from tests.tiny.models import root
from tests.tiny.tokenizer import save_tokenizer

TARGET = "llama"
METHODS = ["ngram", "suffix", "draft_model", "pard", "eagle3"]
_NOISE = 0.08


@functools.cache
def longer(context: int, noise: float = 0.0) -> Path:
    """The target's folder with another context, and weights that are off by so much of their deviation."""
    folder = root() / f"{TARGET}-{context}-{noise}"
    model = tiny.build(TARGET, max_position_embeddings=context)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters() if noise else ():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def config(method: str, most: int = 4, context: int = tiny.CONTEXT, **fields: Any) -> dict[str, Any]:
    """`speculative_config` for the target (of any context); `context` is the draft model's."""
    given: dict[str, Any] = {"method": method, "num_speculative_tokens": most, "adaptive": False, **fields}
    if method == "ngram":
        given["prompt_lookup_min"] = 1
    if method == "draft_model":
        given["model"] = str(longer(context, _NOISE))
    if method == "pard":
        given["model"] = str(pard.checkpoint("qwen2", TARGET, max_position_embeddings=context))
    if method == "eagle3":
        given["model"] = str(eagle3.head("speculators", TARGET))
    return given


def drafted(method: str, most: int = 4, context: int = tiny.CONTEXT, **settings: Any) -> LLM:
    """The target, drafted for; `most` 0: not."""
    if most:
        settings["speculative_config"] = config(method, most, context)
    return make(TARGET, **settings)


def drafted_by(
    variant: str, method: str, folder: Path, most: int, adaptive: bool = False, **settings: Any
) -> LLM:
    """Any tiny target, drafted for by what is in a folder."""
    given = {"method": method, "model": str(folder), "num_speculative_tokens": most, "adaptive": adaptive}
    return make(variant, speculative_config=given, **settings)


def check_choices(outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> None:
    """The same tokens and ends, and log-probabilities, where there are some, as of plain decoding."""
    for output, want in zip(outputs, plain, strict=True):
        for choice, other in zip(output.outputs, want.outputs, strict=True):
            assert choice.token_ids == other.token_ids
            assert (choice.finish_reason, choice.stop_reason) == (other.finish_reason, other.stop_reason)
            assert (choice.logprobs is None) == (other.logprobs is None)
            if choice.logprobs is None:
                continue
            assert len(choice.logprobs) == len(choice.token_ids)
            for entry, reference in zip(choice.logprobs, other.logprobs, strict=True):
                assert entry.keys() == reference.keys()
                assert all(abs(entry[t].logprob - reference[t].logprob) < 1e-3 for t in entry)


def check_whatever_is_asked(variant: str, engine: Callable[[], LLM], settings: Sequence[Any]) -> CoreStats:
    """Requests with each of the settings get what they get without drafts; the drafting engine's figures."""
    params = [SamplingParams(max_tokens=24, detokenize=False, logprobs=1, **fields) for fields in settings]
    prompts = [tiny.PROMPTS[i % len(tiny.PROMPTS)] for i in range(len(params))]
    with make(variant) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    with engine() as llm:
        check_choices(llm.generate(prompts, params, use_tqdm=False), plain)
        return llm.stats()


def check_drafted(llm: LLM) -> None:
    """Some drafts stood and some did not."""
    stats = llm.stats()
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


def spoil_free_pages(patch: pytest.MonkeyPatch) -> list[int]:
    """Before each step, fill free blocks that nobody can find with what is NaN in every dtype; returns a list
    of how many they were."""
    pools: list[BlockPool] = []
    init, execute, spoilt = BlockPool.__init__, Worker.execute, []

    def made(self: BlockPool, num_blocks: int) -> None:
        init(self, num_blocks)
        pools.append(self)

    def spoiling(self: Worker, plan: Any) -> Any:
        refs, keys = pools[-1].holders()
        free = [b for b, (held, key) in enumerate(zip(refs, keys, strict=True)) if not held and key is None]
        for cache in self.runner.kv_caches:
            cache.reshape(len(cache), -1).view(torch.uint8)[free] = 255
        spoilt.append(len(free))
        return execute(self, plan)

    patch.setattr(BlockPool, "__init__", made)
    patch.setattr(Worker, "execute", spoiling)
    return spoilt
