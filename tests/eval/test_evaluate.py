"""Tiny models: figures against Transformers' own logits in float64."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.eval.evaluate import EvalOptions, Evaluation, evaluate
from octavo.eval.windows import Window, make_windows
from octavo.tokenization.tokenizer import load_tokenizer
from tests import tiny

TEXTS = [
    "The quick brown fox jumps over the lazy dog. 今天天气很好，我们去公园散步吧。\n" * 6,
    "A page of a book is a leaf of paper; an octavo has eight of them. def add(a, b):\n    return a + b",
    "Ünïcödé ✓",
]
WINDOW = 48


def config(model: Path | str, **changes: Any) -> EngineConfig:
    defaults = dict(dtype="float32", device="cpu", num_threads=1, check_invariants=True)
    return EngineConfig(model=str(model), **{**defaults, **changes})


def windows_of(texts: list[str], options: EvalOptions, prefix: list[int] | None = None) -> list[Window]:
    tokenizer = load_tokenizer(tiny.checkpoint("llama"))
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return make_windows(ids, prefix or [], options.window, options.stride, options.max_tokens)


@torch.no_grad()
def log_probs(model: Any, windows: list[Window], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Of Transformers: each window's log-probabilities before its scored tokens, float64."""
    model = copy.deepcopy(model).to(dtype)
    logits = [model(torch.tensor([w.token_ids])).logits[0] for w in windows]
    return [
        rows[-w.num_scored - 1 : -1].double().log_softmax(-1) for rows, w in zip(logits, windows, strict=True)
    ]


def losses(found: list[torch.Tensor], windows: list[Window]) -> np.ndarray:
    parts = [
        -rows.gather(1, torch.tensor(w.token_ids[-w.num_scored :])[:, None])[:, 0]
        for rows, w in zip(found, windows, strict=True)
    ]
    return torch.cat(parts).numpy()


def perturbed(folder: Path, scale: float = 0.02) -> Any:
    """The tiny Llama with noise on every weight, and its checkpoint."""
    model = tiny.build("llama")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.add_(scale * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return model


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (EvalOptions(WINDOW), {}),
        (EvalOptions(WINDOW, 20, 150), {"max_num_batched_tokens": 29}),  # windows in chunks, side by side
        (EvalOptions(WINDOW, None, 60), {"max_num_batched_tokens": 1}),  # row by row, as in decoding
        (EvalOptions(200), {"max_num_batched_tokens": 64, "attention_backend": "torch", "block_size": 8}),
        (EvalOptions(17, 3, 90), {"max_num_seqs": 2}),
    ],
)
def test_perplexity_is_that_of_transformers(options, settings):
    windows = windows_of(TEXTS, options)
    want = losses(log_probs(tiny.reference("llama"), windows), windows)
    found = evaluate(config(tiny.checkpoint("llama"), **settings), TEXTS, options)
    assert found.summary["num_tokens"] == len(want) == sum(w.num_scored for w in windows)
    assert found.summary["perplexity"] == pytest.approx(math.exp(want.mean()), rel=1e-4)
    assert "kl_mean" not in found.summary and found.settings["baseline"] is None
    lo = 0
    for record, window in zip(found.windows, windows, strict=True):
        assert (record["text"], record["first_token"]) == (window.document, window.first)
        assert record["nll"] == pytest.approx(want[lo : lo + window.num_scored].mean(), abs=2e-4)
        lo += window.num_scored


@pytest.mark.parametrize("variant", ["gemma3", "qwen3-moe", "deepseek-v3"])
def test_perplexity_of_other_families(variant):
    """Sliding windows, experts, latent attention."""
    options = EvalOptions(100, None, 150)
    windows = windows_of(TEXTS, options)
    # PyTorch's product of grouped experts takes no float64.
    want = losses(log_probs(tiny.reference(variant), windows, torch.float32), windows)
    found = evaluate(config(tiny.checkpoint(variant), max_num_batched_tokens=64), TEXTS, options)
    assert found.summary["perplexity"] == pytest.approx(math.exp(want.mean()), rel=1e-4)


@pytest.mark.parametrize("rows", [None, 21])
def test_a_model_does_not_differ_from_itself(rows):
    same = config(tiny.checkpoint("llama"), max_num_batched_tokens=rows)
    found = evaluate(same, TEXTS, EvalOptions(WINDOW), same).summary
    assert found["kl_mean"] == found["kl_max"] == found["kl_p99"] == 0.0
    assert found["perplexity_ratio"] == 1.0 and found["perplexity_ratio_se"] == 0.0
    assert found["top1_agreement"] == found["top5_overlap"] == 1.0
    assert found["perplexity"] == found["baseline_perplexity"]


def test_chunks_of_another_size_differ_by_rounding_at_most():
    model = tiny.checkpoint("llama")
    found = evaluate(
        config(model, max_num_batched_tokens=5), TEXTS, EvalOptions(WINDOW, None, 100), config(model)
    ).summary
    assert 0.0 <= found["kl_mean"] < 1e-9
    assert found["top1_agreement"] == 1.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("perturbed")
    return folder, perturbed(folder)


def test_divergence_of_perturbed_weights_is_that_of_transformers(pair):
    folder, changed = pair
    options = EvalOptions(WINDOW, 30)
    windows = windows_of(TEXTS, options)
    theirs, ours = log_probs(tiny.reference("llama"), windows), log_probs(changed, windows)
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(theirs, ours, strict=True)]).numpy()
    found = evaluate(
        config(folder, max_num_batched_tokens=64), TEXTS, options, config(tiny.checkpoint("llama"))
    ).summary
    assert 1e-4 < kl.mean() < 0.1
    assert found["kl_mean"] == pytest.approx(kl.mean(), rel=1e-3)
    for percentile in (50, 90, 95, 99, 99.9):
        want = np.percentile(kl, percentile)
        assert found[f"kl_p{percentile:g}"] == pytest.approx(want, rel=2e-3)
    assert found["kl_max"] == pytest.approx(kl.max(), rel=2e-3)
    difference = losses(ours, windows).mean() - losses(theirs, windows).mean()
    assert found["perplexity_ratio"] == pytest.approx(math.exp(difference), rel=1e-4)
    same = [(p.argmax(-1) == q.argmax(-1)).double() for p, q in zip(theirs, ours, strict=True)]
    assert found["top1_agreement"] == pytest.approx(float(torch.cat(same).mean()), abs=1e-6)
    common = [
        np.mean([len(set(a) & set(b)) / 5 for a, b in zip(p.tolist(), q.tolist(), strict=True)])
        * len(p)
        for p, q in ((p.topk(5).indices, q.topk(5).indices) for p, q in zip(theirs, ours, strict=True))
    ]  # fmt: skip
    assert found["top5_overlap"] == pytest.approx(sum(common) / len(kl), abs=1e-6)
    assert 0.0 < found["kl_mean_se"] < found["kl_mean"]
    assert 0.0 < found["perplexity_ratio_se"] < found["perplexity_se"]


def test_bfloat16_is_near_float32_and_a_gguf_file_is_the_folder(tmp_path):
    folder, options = tiny.checkpoint("llama"), EvalOptions(WINDOW)
    found = evaluate(config(folder, dtype="bfloat16"), TEXTS, options, config(folder))
    assert 1e-7 < found.summary["kl_mean"] < 1e-2
    assert abs(found.summary["perplexity_ratio"] - 1) < 0.02
    assert found.settings["model"]["ran"]["dtype"] == "bfloat16"
    assert found.settings["baseline"]["ran"]["dtype"] == "float32"
    gguf = tiny.gguf_file("llama", tmp_path / "llama.gguf")
    assert evaluate(config(gguf), TEXTS, options, config(folder)).summary["kl_max"] < 1e-9


def with_tokenizer(folder: Path, change: Any) -> Path:
    """The tiny Llama with a changed tokenizer."""
    from tokenizers import Tokenizer

    tiny.reference("llama").save_pretrained(folder)
    tiny.save_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(change(Tokenizer.from_str(path.read_text())), encoding="utf-8")
    return folder


def begin_with_bos(tokenizer: Any) -> str:
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tiny.BOS)])
    return tokenizer.to_str()


def swap(tokenizer: Any) -> str:
    text = tokenizer.to_str()
    a, b = tokenizer.token_to_id("q"), tokenizer.token_to_id("z")
    return (
        text.replace(f'"q":{a},', '"q":-1,').replace(f'"z":{b},', f'"z":{a},').replace('"q":-1,', f'"q":{b},')
    )


def test_every_window_begins_with_bos_where_the_tokenizer_begins_texts_with_it(tmp_path):
    folder = with_tokenizer(tmp_path, begin_with_bos)
    options = EvalOptions(WINDOW)
    windows = windows_of(TEXTS, options, [tiny.BOS])
    want = losses(log_probs(tiny.reference("llama"), windows), windows)
    found = evaluate(config(folder), TEXTS, options)
    assert found.settings["prefix"] == [tiny.BOS]
    assert found.summary["num_tokens"] == len(want)
    assert found.summary["perplexity"] == pytest.approx(math.exp(want.mean()), rel=1e-4)
    with pytest.raises(ConfigError, match=r"begins texts with \[1\] and .* with \[\]"):
        evaluate(config(folder), TEXTS, options, config(tiny.checkpoint("llama")))


def test_models_of_other_tokens_are_not_compared(tmp_path):
    base = config(tiny.checkpoint("llama"))
    swapped = with_tokenizer(tmp_path / "swapped", swap)
    with pytest.raises(ConfigError, match="the tokenizers differ: token '[qz]' is"):
        evaluate(config(swapped), TEXTS, EvalOptions(WINDOW), base)
    tiny.build("llama", vocab_size=400).save_pretrained(tmp_path / "larger")
    tiny.save_tokenizer(tmp_path / "larger")
    with pytest.raises(ConfigError, match="vocabulary of 400 tokens and the baseline .* one of 384"):
        evaluate(config(tmp_path / "larger"), TEXTS, EvalOptions(WINDOW), base)


def test_what_cannot_be_evaluated_is_told_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("octavo.eval.subject.PromptEngine", lambda config: pytest.fail("loaded"))
    folder = tiny.checkpoint("llama")
    cases: list[tuple[dict[str, Any], EvalOptions, type[Exception], str]] = [
        ({"runner": "pooling"}, EvalOptions(WINDOW), ConfigError, "makes embeddings"),
        ({"skip_tokenizer_init": True}, EvalOptions(WINDOW), RequestError, "skip_tokenizer_init"),
        ({}, EvalOptions(tiny.CONTEXT + 1), ConfigError, "beyond the context of 256 tokens"),
        ({"max_model_len": 32}, EvalOptions(WINDOW), ConfigError, "beyond max_model_len=32"),
    ]
    for settings, options, kind, told in cases:
        with pytest.raises(kind, match=told):
            evaluate(config(folder, **settings), TEXTS, options)


def test_a_cache_too_small_for_a_window_is_refused():
    small = config(tiny.checkpoint("llama"), kv_cache_memory_bytes=20_000)
    with pytest.raises(ConfigError, match="the KV cache of .* holds .* tokens"):
        evaluate(small, TEXTS, EvalOptions(WINDOW))
    with pytest.raises(ConfigError, match="the baseline, beside the model: window=48"):
        evaluate(config(tiny.checkpoint("llama")), TEXTS, EvalOptions(WINDOW), small)


def test_weights_that_give_no_numbers_are_told(tmp_path):
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="scored token 0 .* no finite log-probability"):
        evaluate(config(tmp_path), TEXTS, EvalOptions(WINDOW))


def test_the_context_is_shortened_only_where_positions_do_not_depend_on_it():
    def length(variant: str, **changes: Any) -> Any:
        found: Evaluation = evaluate(
            config(tiny.checkpoint(variant), **changes), TEXTS, EvalOptions(WINDOW, None, 40)
        )
        return found.settings["model"]["max_model_len"]

    assert length("llama") == WINDOW
    assert length("llama", max_model_len=200) == 200
    assert length("dynamic") == 2 * tiny.CONTEXT  # frequencies follow the whole context's length


def test_progress_counts_every_token():
    seen: list[Any] = []
    found = evaluate(
        config(tiny.checkpoint("llama"), max_num_batched_tokens=64), TEXTS, EvalOptions(WINDOW), None,
        lambda total: seen.append(total), lambda done, perplexity: seen.append((done, perplexity)),
    )  # fmt: skip
    total, *steps = seen
    assert total == steps[-1][0] == found.summary["num_tokens"]
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1][1] == pytest.approx(found.summary["perplexity"])
