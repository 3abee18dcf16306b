"""Every method of drafting for a tiny target, such that some drafts are right and some are not."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from octavo import LLM
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


def check_drafted(llm: LLM) -> None:
    """Some drafts stood and some did not."""
    stats = llm.stats()
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
