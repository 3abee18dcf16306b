"""EAGLE-3 heads of each dialect: drafts are those of a plain float64 implementation, and change no token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.engine import head_drafting
from octavo.errors import OctavoError
from octavo.models.eagle3_config import eagle3_config
from octavo.worker.head_runner import HeadDrafter
from tests import tiny
from tests.engine.speculative_methods import check_whatever_is_asked, drafted_by
from tests.engine.test_llm_parity import GREEDY, expected, generate, make
from tests.engine.test_speculative_parity import PARAMS
from tests.tiny import eagle3


def drafted(
    variant: str, head: str, trained: bool = False, most: int = 4, adaptive: bool = False, **settings: Any
) -> LLM:
    folder = eagle3.head(head, variant if trained else None)
    return drafted_by(variant, "eagle3", folder, most, adaptive, **settings)


class Watch:
    """Sees all drafts: the tokens before each, where the head's own context began, and the drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[list[int], int, list[int]]] = []
        after_step = HeadDrafter.after_step

        def watched(drafter: HeadDrafter, plan: Any, inputs: Any, known: Any, num_tokens: Any) -> Any:
            drafted = after_step(drafter, plan, inputs, known, num_tokens)
            counts = np.zeros(0) if plan.propose is None else plan.propose.counts
            for i in np.flatnonzero(counts).tolist():
                length = int(known[int(np.searchsorted(inputs.sample_requests, i))])
                row = drafter._head._table[int(plan.slots[i])].tolist()
                begin = int(drafter._head._begin[plan.slots[i]])
                self.seen.append((row[:length], begin, row[length : length + int(counts[i])]))
            return drafted

        monkeypatch.setattr(HeadDrafter, "after_step", watched)

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
        dict(kv_cache_memory_bytes=220 << 10, block_size=8, look_ahead_admission=False, max_num_seqs=3),
        dict(enforce_eager=True, enable_prefix_caching=False),
    ],
)
def test_a_trained_head_whatever_the_engine_does_beside(
    settings: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch
):
    watch = Watch(monkeypatch)
    with drafted("llama", "speculators", True, async_scheduling=overlap, **settings) as llm:
        for _ in range(2):
            assert generate(llm) == expected("llama")
        stats = llm.stats()
        assert stats.spec_accepted_per_pos[0] > 0.9 * stats.spec_drafts > 0  # it was taught one token ahead
        assert stats.num_steps < 2 * tiny.NEW_TOKENS * 1.5
        if "kv_cache_memory_bytes" in settings:
            assert stats.num_preemptions > 0
    watch.check("speculators", "llama", True, every=7)
    # Behind what the prefix cache had (also after a preemption) the head's own context begins there.
    assert any(begin for _, begin, _ in watch.seen) == settings.get("enable_prefix_caching", True)


def test_whatever_requests_ask():
    stats = check_whatever_is_asked("llama", lambda: drafted("llama", "speculators", True, most=3), PARAMS)
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


def test_adaptive_drafts_change_nothing_either():
    with drafted("llama", "speculators", True, adaptive=True) as llm:
        for _ in range(3):
            assert generate(llm) == expected("llama")


def test_requests_whose_drafts_do_not_pay_are_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_drafting, "_PATIENCE", 3)
    monkeypatch.setattr(head_drafting, "_REST", 5)
    watch, followed = Watch(monkeypatch), []
    enough = [0, 0, 0, 2]  # what pays, over and over

    def choose(self: Any, slots: np.ndarray, able: np.ndarray, known: np.ndarray, _: int) -> np.ndarray:
        return able * enough[len(followed) // 7 % len(enough)]

    plan_next = head_drafting.HeadDrafting.plan_next

    def planned(self: Any, *args: Any) -> Any:
        order = plan_next(self, *args)
        followed.append(order is not None)
        return order

    monkeypatch.setattr(head_drafting.HeadDrafting, "_choose", choose)
    monkeypatch.setattr(head_drafting.HeadDrafting, "plan_next", planned)
    with drafted("llama", "speculators", True, adaptive=True) as llm:
        output = llm.generate([tiny.PROMPTS[1]], GREEDY, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == expected("llama")[1]
    assert followed[:12] == [True] * 3 + [False] * 5 + [True] * 3 + [False]
    assert any(begin > len(tiny.PROMPTS[1]) for _, begin, _ in watch.seen)
    watch.check("speculators", "llama", True)


@pytest.mark.parametrize("variant", ["qwen3", "gemma2", "mixtral"])
def test_other_families_give_states(variant: str):
    """Gemma's embeddings are scaled, its windows make several KV groups; a head of any target has its own."""
    with drafted(variant, "speculators") as llm:
        assert generate(llm) == expected(variant)
        assert llm.stats().spec_draft_tokens > 0


def _changed(tmp_path: Path, head: str = "speculators", d2t: Any = None, **changes: Any) -> str:
    """A copy of a head with another config, or other ids."""
    shutil.copytree(eagle3.head(head), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if d2t is not None:
        weights = tmp_path / "head" / "model.safetensors"
        tensors = load_file(weights)
        d2t(tensors["d2t"])
        save_file(tensors, weights)
    return str(tmp_path / "head")


def _far(ids: torch.Tensor) -> None:
    ids[7] = 1000


def _twice(ids: torch.Tensor) -> None:
    ids[8] = ids[7] - 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(target_hidden_size=128), "hidden states of 128"),
        (dict(transformer_layer_config={**eagle3.LLAMA, "vocab_size": 1000}), "its vocab_size is 1000"),
        (dict(transformer_layer_config={**eagle3.LLAMA, "num_hidden_layers": 2}), "has 2 layers"),
        (dict(transformer_layer_config=3), "transformer_layer_config is no JSON object"),
        (dict(draft_vocab_size=1000), "draft_vocab_size=1000 is more"),
        (dict(draft_vocab_size=None), "there is no draft_vocab_size"),
        (dict(speculators_model_type="peagle"), "'peagle' is not supported"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), r"\[1, 2, 9\] are not three ascending layers"),
        (dict(eagle_aux_hidden_state_layer_ids="all"), "no list of layers"),
        (dict(eagle_aux_hidden_state_layer_ids=None), "3 layers are too few"),
        (dict(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm are both set"),
        (dict(fc_norm="yes"), "fc_norm='yes'"),
        (dict(norm_before_fc=True), "input_norm.weight"),
        (dict(d2t=_far), r"draft token 7 the target's 1007"),
        (dict(d2t=_twice), "one target token to two"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str):
    config = {"method": "eagle3", "model": _changed(tmp_path, **changes)}
    with pytest.raises(OctavoError, match=words) as error:
        make("llama", speculative_config=config)
    assert "\n" not in str(error.value)


def test_a_model_that_gives_no_states_is_refused():
    config = {"method": "eagle3", "model": str(eagle3.head("speculators"))}
    with pytest.raises(OctavoError, match="run by Transformers' code"):
        make("llama", speculative_config=config, model_impl="transformers")
    with pytest.raises(OctavoError, match="needs a model: name its folder or hub id"):
        make("llama", speculative_config={"method": "eagle3"})


def test_the_usual_layers():
    target = SimpleNamespace(
        num_layers=32, hidden_size=64, vocab_size=tiny.VOCAB_SIZE, architecture="Llama", dtype="float32"
    )
    name = "eagle_aux_hidden_state_layer_ids"
    for head, ids, want in (
        ("specforge", None, (2, 16, 29)), ("specforge", [1, 15, 28], (2, 16, 29)),
        ("speculators", None, (2, 16, 29)), ("speculators", [2, 16, 29], (2, 16, 29)),
    ):  # fmt: skip
        raw = dict(eagle3.DIALECTS[head].config)
        if head == "specforge":
            raw["eagle_config"] = {name: ids}
        else:
            raw[name] = ids
        assert eagle3_config(raw, target, True).aux_layers == want
    # Beside the other fields they are inputs, whoever wrote them.
    raw = {**eagle3.DIALECTS["specforge"].config, name: [2, 16, 29], "eagle_config": {name: [0, 1, 2]}}
    assert eagle3_config(raw, target, True).aux_layers == (2, 16, 29)


@pytest.mark.parametrize("head", sorted(eagle3.DIALECTS))
def test_a_head_is_no_draft_model(head: str):
    config = {"method": "draft_model", "model": str(eagle3.head(head))}
    with pytest.raises(OctavoError, match="is a head.*give method='eagle3'") as error:
        make("llama", speculative_config=config)
    assert "\n" not in str(error.value)
