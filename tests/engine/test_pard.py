"""Drafts of one pass: they are those of the plain definition, and change no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine import worker_drafting
from octavo.errors import ConfigError
from octavo.kv.draft_blocks import DraftBlocks
from octavo.speculative.pard import Pard
from tests import tiny
from tests.engine.speculative_methods import check_whatever_is_asked, drafted_by
from tests.engine.test_llm_parity import expected, generate, make
from tests.engine.test_speculative_parity import PARAMS
from tests.tiny import pard


def drafted(
    variant: str, draft: str, trained: bool = True, most: int = 5, adaptive: bool = False, **settings: Any
) -> LLM:
    folder = pard.checkpoint(draft, variant if trained else None)
    return drafted_by(variant, "pard", folder, most, adaptive, **settings)


class Watch:
    """Sees all drafts, and the tokens before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[list[int], list[int]]] = []
        propose = Pard.propose

        def watched(own: Pard, slots: np.ndarray, counts: np.ndarray, *rest: Any) -> None:
            propose(own, slots, counts, *rest)
            known = rest[2]
            for i in np.flatnonzero(counts).tolist():
                row, length = own._table[int(slots[i])].tolist(), int(known[i])
                self.seen.append((row[:length], row[length : length + int(counts[i])]))

        monkeypatch.setattr(Pard, "propose", watched)

    def check(self, model: Any, every: int = 1) -> None:
        """Every so many-th of the drafts is what the plain definition drafts."""
        compared = 0
        for tokens, got in self.seen[::every]:
            want, lead = pard.drafts(model, tokens, len(got))
            if lead > 1e-4:
                assert got == want
                compared += 1
        assert compared > 0.9 * len(self.seen[::every]) > 0


@pytest.mark.parametrize(("variant", "draft"), [("llama", "qwen2"), ("qwen3", "gemma2"), ("llama", "gemma3")])
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_equal_the_plain_definition(
    variant: str, draft: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
):
    watch = Watch(monkeypatch)
    with drafted(variant, draft, trained=False, async_scheduling=overlap) as llm:
        assert generate(llm) == expected(variant)
        assert llm.stats().spec_draft_tokens > 0
    watch.check(pard.model(draft), every=5)


# Requests are preempted where memory is short.
SETTINGS: list[dict[str, Any]] = [
    dict(max_num_batched_tokens=7),
    dict(kv_cache_memory_bytes=220 << 10, block_size=8, look_ahead_admission=False, max_num_seqs=3),
    dict(enforce_eager=True, enable_prefix_caching=False),
    dict(attention_backend="torch", block_size=32),
]


@pytest.fixture(params=[True, False])
def seen_by_the_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With False the host works with bounds of what is known, as it does beside a GPU."""
    init = Pard.__init__

    def made(own: Pard, *args: Any, **kwargs: Any) -> None:
        init(own, *args, **kwargs)
        own._host_sees = request.param

    monkeypatch.setattr(Pard, "__init__", made)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_whatever_the_engine_does_beside(
    settings: dict[str, Any], overlap: bool, seen_by_the_host: None, monkeypatch: pytest.MonkeyPatch
):
    watch = Watch(monkeypatch)
    with drafted("llama", "qwen2", async_scheduling=overlap, **settings) as llm:
        for _ in range(2):  # with the prompts' blocks in the cache the second time
            assert generate(llm) == expected("llama")
        stats = llm.stats()
        assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
        assert stats.spec_accepted_per_pos[2] > 0  # it was taught to
        assert (stats.num_preemptions > 0) == ("kv_cache_memory_bytes" in settings)
    watch.check(pard.model("qwen2", "llama"), every=9)


QUANTIZED = [
    dict(kv_cache_dtype="int8"),
    dict(kv_cache_dtype="fp8"),
    dict(quantization="int8_weight_only"),
]


@pytest.mark.parametrize("settings", QUANTIZED)
def test_quantized_weights_and_caches(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    with make("llama", **settings) as llm:
        plain = generate(llm)
    watch = Watch(monkeypatch)
    with drafted("llama", "qwen2", **settings) as llm:
        assert generate(llm) == plain
        assert llm.stats().spec_accepted_tokens > 0
    watch.check(pard.model("qwen2", "llama"), every=5)  # whose own are as its checkpoint says


def test_whatever_requests_ask():
    stats = check_whatever_is_asked("llama", lambda: drafted("llama", "qwen2"), PARAMS)
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


def test_penalties_see_the_drafts_before_and_no_masks(monkeypatch: pytest.MonkeyPatch):
    """A draft is the likeliest token that no token before it is: each, drafts too, is forbidden by bias."""
    watch = Watch(monkeypatch)
    params = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False, presence_penalty=2.0,
        frequency_penalty=2.0, repetition_penalty=2.0,
    )  # fmt: skip
    with drafted("llama", "qwen2") as llm:
        llm.generate([tiny.PROMPTS[0]], params, use_tqdm=False)
    made, prompt = pard.model("qwen2", "llama"), len(tiny.PROMPTS[0])
    for tokens, got in watch.seen:
        ids = torch.tensor([[*tokens, *[pard.MASK] * (len(got) - 1)]])
        with torch.no_grad():
            rows = made(ids).logits[0, -len(got) :].double()
        for i, row in enumerate(rows):
            before = [*tokens, *got[:i]]
            for token in set(before):
                row[token] = row[token] / 2 if row[token] > 0 else row[token] * 2
                count = before[prompt:].count(token)
                row[token] -= 2.0 * count + 2.0 * (count > 0)
            best = row.topk(2)
            if best.values[0] - best.values[1] > 1e-4:
                assert int(best.indices[0]) == got[i]
    assert len(watch.seen) > 5


def test_adaptive_drafts_change_nothing_either():
    with drafted("llama", "qwen2", adaptive=True) as llm:
        for _ in range(3):
            assert generate(llm) == expected("llama")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("context", [64, tiny.CONTEXT])
def test_the_ends_of_contexts(
    context: int, overlap: bool, seen_by_the_host: None, monkeypatch: pytest.MonkeyPatch
):
    """The target's is used to its last token; a draft of a shorter one drafts up to that, and no further."""
    watch = Watch(monkeypatch)
    folder = pard.checkpoint("qwen2", "llama", max_position_embeddings=context)
    config = {"method": "pard", "model": str(folder), "num_speculative_tokens": 6, "adaptive": False}
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, detokenize=False)
    outputs = []
    for speculative in (None, config):
        settings: dict[str, Any] = dict(max_model_len=110, async_scheduling=overlap)
        with make("llama", speculative_config=speculative, **settings) as llm:
            given = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
            outputs.append([output.outputs[0].token_ids for output in given])
    assert outputs[0] == outputs[1]
    assert [len(p) + len(o) for p, o in zip(tiny.PROMPTS, outputs[1], strict=True)] == [106, 110, 110]
    ends = [len(tokens) + len(drafts) for tokens, drafts in watch.seen]
    most = 65 if context == 64 else 109  # the last draft is no input
    assert most - 6 * overlap <= max(ends) <= most  # drafts in flight may all stand, as far as is known


@pytest.mark.parametrize("method", ["pard", "draft_model"])
def test_a_slot_whose_blocks_were_taken_back_begins_anew(method: str, monkeypatch: pytest.MonkeyPatch):
    """A model that drafts for itself is right again when it has blocks again."""
    refused = [0]
    extend, release = DraftBlocks.extend, DraftBlocks.release

    def short(blocks: DraftBlocks, slot: int, num_tokens: int, num_running: int) -> bool:
        refused[0] += 1
        return refused[0] % 6 != 0 and extend(blocks, slot, num_tokens, num_running)

    def shuffled(blocks: DraftBlocks, slot: int) -> None:
        release(blocks, slot)
        blocks._pool.release(blocks._pool.allocate(5)[::-1])  # so that it gets others the next time

    monkeypatch.setattr(worker_drafting, "_PAUSE", 0)
    monkeypatch.setattr(DraftBlocks, "extend", short)
    monkeypatch.setattr(DraftBlocks, "release", shuffled)
    config = {"method": method, "model": str(pard.checkpoint("llama")), "num_speculative_tokens": 1}
    with make("llama", speculative_config={**config, "adaptive": False}, block_size=8) as llm:
        assert generate(llm) == expected("llama")
        stats = llm.stats()
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 0 and refused[0] > 12


def test_forms_are_not_drafted_for():
    from octavo.sampling_params import StructuredOutputsParams

    form = SamplingParams(
        temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-f]{8}")
    )
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts = []
    for speculative in (False, True):
        made = drafted if speculative else make
        names = ("llama", "qwen2") if speculative else ("llama",)
        with made(*names, skip_tokenizer_init=False) as llm:
            outputs = llm.generate(["a b", "a b"], [form, free], use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
            if speculative:
                assert llm.stats().spec_draft_tokens > 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize("token", [384, -1, "x", True])
def test_a_mask_token_that_is_none_is_refused(token: Any):
    folder = pard.checkpoint("qwen2", None, pard_token=token)
    with pytest.raises(ConfigError, match=f"mask token {token!r}"):
        make("llama", speculative_config={"method": "pard", "model": str(folder)})


def test_models_without_a_mask_token_are_refused():
    with pytest.raises(ConfigError, match="states no mask token"):
        make("llama", speculative_config={"method": "pard", "model": str(tiny.checkpoint("qwen2"))})


def test_under_its_other_name():
    folder = pard.checkpoint("qwen2", None, pard_token=None, ptd_token_id=pard.MASK)
    config = {"method": "draft_model", "model": str(folder), "parallel_drafting": True, "adaptive": False}
    with make("llama", speculative_config=config) as llm:
        assert generate(llm) == expected("llama")
        assert llm.facts.summary["speculation"].startswith("pard ")
        assert llm.stats().spec_draft_tokens > 0
