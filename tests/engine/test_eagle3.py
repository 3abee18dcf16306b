"""EAGLE-3 heads of each dialect: their drafts are those of a plain float64 implementation, and change no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM
from octavo.speculative.eagle3 import Eagle3
from tests.engine.test_llm_parity import expected, generate, make
from tests.tiny import eagle3


def drafted(
    variant: str, head: str, trained: bool = False, most: int = 4, adaptive: bool = False, **settings: Any
) -> LLM:
    config = {
        "method": "eagle3",
        "model": str(eagle3.head(head, variant if trained else None)),
        "num_speculative_tokens": most,
        "adaptive": adaptive,
    }
    return make(variant, speculative_config=config, **settings)


class Watch:
    """Sees all drafts: the tokens before each, where the head's own context began, and the drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[list[int], int, list[int]]] = []
        follow = Eagle3.follow

        def watched(eagle: Eagle3, step: Any, counts: np.ndarray, most: Any, known: torch.Tensor, *rest: Any):
            follow(eagle, step, counts, most, known, *rest)
            chosen = np.flatnonzero(counts)
            for i, length in zip(chosen.tolist(), known.tolist(), strict=True):
                row = eagle._table[int(step.slots[i])].tolist()
                begin = int(eagle._begin[step.slots[i]])
                self.seen.append((row[:length], begin, row[length : length + int(counts[i])]))

        monkeypatch.setattr(Eagle3, "follow", watched)

    def check(self, head: str, variant: str, trained: bool = False, every: int = 1) -> None:
        """Every so many-th of the drafts is what the plain implementation drafts."""
        dialect, weights = eagle3.DIALECTS[head], eagle3.weights(head, variant if trained else None)
        compared = 0
        for tokens, begin, got in self.seen[::every]:
            want, lead = eagle3.drafts(dialect, weights, variant, tokens, begin, len(got))
            if lead > 1e-4:
                assert got == want
                compared += 1
        assert compared > 0.9 * len(self.seen[::every]) > 0


@pytest.mark.parametrize("head", sorted(eagle3.DIALECTS))
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_equal_the_plain_implementation(head: str, overlap: bool, monkeypatch: pytest.MonkeyPatch):
    watch = Watch(monkeypatch)
    with drafted("llama", head, async_scheduling=overlap) as llm:
        assert generate(llm) == expected("llama")
        assert llm.stats().spec_draft_tokens > 0
    watch.check(head, "llama", every=5)
    assert all(begin == 0 for _, begin, _ in watch.seen)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=7),
        dict(kv_cache_memory_bytes=640 << 10, block_size=8, look_ahead_admission=False, max_num_seqs=3),
        dict(enforce_eager=True, enable_prefix_caching=False),
    ],
)
def test_whatever_the_engine_does_beside(
    settings: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch
):
    watch = Watch(monkeypatch)
    with drafted("llama", "speculators", True, async_scheduling=overlap, **settings) as llm:
        assert generate(llm) == expected("llama")
        stats = llm.stats()
        assert 0.3 * stats.spec_draft_tokens < stats.spec_accepted_tokens
    watch.check("speculators", "llama", True, every=3)
