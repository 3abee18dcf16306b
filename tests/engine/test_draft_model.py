"""A draft model changes no token: tiny random models, drafted for by others and by themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from octavo import LLM
from octavo.errors import ConfigError
from tests import tiny
from tests.engine.speculative_methods import check_whatever_is_asked, drafted_by
from tests.engine.test_llm_parity import expected, generate, make
from tests.engine.test_speculative_parity import PARAMS


def drafted(variant: str, draft: str, most: int = 4, adaptive: bool = False, **settings: Any) -> LLM:
    return drafted_by(variant, "draft_model", tiny.checkpoint(draft), most, adaptive, **settings)


@pytest.mark.parametrize(("variant", "draft"), [("llama", "llama"), ("llama", "qwen2"), ("qwen3", "gemma2")])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_equals_transformers(variant: str, draft: str, overlap: bool):
    with drafted(variant, draft, async_scheduling=overlap) as llm:
        for _ in range(2):  # with the prompts' blocks in the cache the second time
            assert generate(llm) == expected(variant)
        stats = llm.stats()
        assert stats.spec_draft_tokens > 0
        if variant == draft:  # a model drafts for itself: all stand, whatever the draft's cache went through
            assert stats.spec_accepted_tokens == stats.spec_draft_tokens
            assert stats.num_steps < 2 * tiny.NEW_TOKENS / 2
        else:
            assert stats.spec_accepted_tokens < stats.spec_draft_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=7),
        dict(kv_cache_memory_bytes=220 << 10, block_size=8, look_ahead_admission=False, max_num_seqs=3),
        dict(enable_prefix_caching=False, enforce_eager=True),
        dict(kv_cache_dtype="int8"),
    ],
)
def test_whatever_the_engine_does_beside(settings: dict[str, Any], overlap: bool):
    with make("llama", **settings) as llm:
        plain = generate(llm)
    with drafted("llama", "llama", most=3, async_scheduling=overlap, **settings) as llm:
        assert generate(llm) == plain
        assert llm.stats().spec_accepted_tokens > 0


@pytest.mark.parametrize("draft", ["qwen3", "llama"])
def test_whatever_requests_ask(draft: str):
    stats = check_whatever_is_asked("qwen3", lambda: drafted("qwen3", draft, most=5), PARAMS)
    if draft == "qwen3":  # the same noise and the same logits: draws agree too
        assert stats.spec_accepted_tokens == stats.spec_draft_tokens


def test_adaptive_drafts_change_nothing_either():
    with drafted("llama", "llama", adaptive=True) as llm:
        for _ in range(3):
            assert generate(llm) == expected("llama")


def test_refused_by_name():
    for config, words in [
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "model": "x"}, "has no model"),
        ({"method": "draft_model", "model": "no such folder"}, "no such folder"),
    ]:
        with pytest.raises(Exception, match=words) as error:
            make("llama", speculative_config=config)
        assert "\n" not in str(error.value)


def test_another_vocabulary_is_refused():
    from octavo.worker import draft_loading

    settings = SimpleNamespace(skip_tokenizer_init=True, load_format="auto")
    names = [SimpleNamespace(name=name) for name in ("target", "draft")]
    sizes = [SimpleNamespace(vocab_size=n) for n in (100, 99)]
    with pytest.raises(ConfigError, match="99 tokens, not 100"):
        draft_loading._check_vocabulary(settings, settings, names[0], sizes[0], names[1], sizes[1])


def test_vocabularies_are_compared_token_by_token(monkeypatch: pytest.MonkeyPatch):
    from octavo.worker import draft_loading

    texts: dict[str, list[bytes]] = {
        "target": [b"a", b"b", b"c", b""], "same": [b"a", b"b", b"c"], "swapped": [b"a", b"c", b"b", b""],
        "longer": [b"a", b"b", b"c", b"", b"d"],
    }  # fmt: skip

    def load(name: str) -> Any:
        table = texts[name]
        return SimpleNamespace(vocab_size=len(table), byte_table=lambda skip: dict(enumerate(table)))

    monkeypatch.setattr(draft_loading, "load_tokenizer", load)
    monkeypatch.setattr(draft_loading, "configured_tokenizer", lambda config, source: source.name)
    settings = SimpleNamespace(skip_tokenizer_init=False, load_format="auto")

    def check(name: str) -> None:
        target, draft = SimpleNamespace(name="target"), SimpleNamespace(name=name)
        sizes = [SimpleNamespace(vocab_size=n) for n in (4, 6)]
        draft_loading._check_vocabulary(settings, settings, target, sizes[0], draft, sizes[1])

    check("same")  # what is missing there is padding
    with pytest.raises(ConfigError, match="token 1 is b'c' there and b'b' here"):
        check("swapped")
    with pytest.raises(ConfigError, match="5 tokens, not 4"):
        check("longer")
