"""Perplexity of a model on texts, and its divergence from a baseline, as this engine runs both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.eval.divergence import score
from octavo.eval.prompt_engine import PromptEngine
from octavo.eval.statistics import BLOCK, RESAMPLES, Blocks, exponential, summarize
from octavo.eval.subject import Subject, check_same_tokens
from octavo.eval.windows import Window, make_batches, make_windows

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
ROWS = 2048
"""Tokens of windows that are computed together, unless a step is set to hold another number."""
MOST_WINDOWS = 64
SLICE_ELEMENTS = 1 << 21
"""Logits of one model held at once: 16 MiB in float64, few times that in all, and below the size from which
allocators of the CPU ask the system for each tensor anew."""

OnProgress = Callable[[int, float], None]


@dataclass(frozen=True)
class EvalOptions:
    """How texts are cut: see `octavo.eval.windows.make_windows`."""

    window: int = 512
    stride: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    Attributes:
        summary: figures by name (`octavo.eval.statistics.summarize`), and the counts they stand on.
        settings: all that they depend on: options, and of each model settings and what really ran.
        windows: of each window its text, place and figures.
    """

    summary: dict[str, Any]
    settings: dict[str, Any]
    windows: list[dict[str, Any]]


def evaluate(
    config: EngineConfig,
    texts: Sequence[str],
    options: EvalOptions | None = None,
    baseline: EngineConfig | None = None,
    on_start: Callable[[int], None] = lambda tokens: None,
    on_progress: OnProgress = lambda tokens, perplexity: None,
) -> Evaluation:
    """Score every token of texts by a model, and compare its predictions with a baseline's.

    Both engines are loaded at once and compute the same windows in turn; logits exist for a slice of
    positions at a time. The prefix cache and device graphs are off; everything else is as in serving.

    Args:
        config, baseline: settings of the two engines.
        texts: each is evaluated by itself.
        options: how they are cut.
        on_start: told once how many tokens will be scored, when the models are loaded.
        on_progress: told after each batch how many are, and the perplexity so far.

    Raises:
        ConfigError: settings or texts that cannot be evaluated, or models that cannot be compared.
        ModelError: a model that cannot be loaded, or whose logits are no numbers.
        RequestError: no tokenizer.
        RequestFailedError, EngineDeadError: a step failed.
    """
    options = options or EvalOptions()
    begin = time.perf_counter()
    model = Subject(config)
    subjects = [model] if baseline is None else [model, Subject(baseline)]
    for subject in subjects:
        subject.check_window(options.window)
    documents = model.encode(texts)
    for other in subjects[1:]:
        check_same_tokens(model, other, texts, documents)
    windows = make_windows(documents, model.prefix, options.window, options.stride, options.max_tokens)
    _check_ids(model, windows)
    batches = make_batches(windows, model.config.max_num_batched_tokens or ROWS, MOST_WINDOWS)
    figures: dict[str, list[np.ndarray]] = {}
    with contextlib.ExitStack() as stack:
        engines = _load(stack, subjects, options.window, max(map(len, batches)))
        on_start(sum(window.num_scored for window in windows))
        done, total = 0, 0.0
        for batch in batches:
            for found in _score_batch(engines, batch):
                _check_finite(found, subjects, done)
                for name, values in found.items():
                    figures.setdefault(name, []).append(values)
                done, total = done + len(found["nll"]), total + float(found["nll"].sum())
            on_progress(done, exponential(total / done))
        computed = sum(len(window.token_ids) - 1 for window in windows)
        ran = [
            _describe(subject, engine, computed) for subject, engine in zip(subjects, engines, strict=True)
        ]
    whole = {name: np.concatenate(parts) for name, parts in figures.items()}
    blocks = Blocks([window.num_scored for window in windows])
    summary = {
        "num_texts": len({window.document for window in windows}),
        "num_windows": len(windows),
        "num_tokens": len(whole["nll"]),
        "num_blocks": len(blocks),
        "duration_s": time.perf_counter() - begin,
        **summarize(whole, blocks, PERCENTILES, config.seed),
    }
    errors = {"block_tokens": BLOCK, "bootstrap_resamples": RESAMPLES, "bootstrap_seed": config.seed}
    settings = {**asdict(options), "errors": errors, "prefix": model.prefix, "model": ran[0]}
    settings["baseline"] = ran[1] if baseline is not None else None
    return Evaluation(summary, settings, _records(whole, windows))


def _load(
    stack: contextlib.ExitStack, subjects: Sequence[Subject], window: int, most: int
) -> list[PromptEngine]:
    engines: list[PromptEngine] = []
    for subject in subjects:
        try:
            engine = subject.load(window, most)
        except ConfigError as error:
            if not engines:
                raise
            raise ConfigError(f"the baseline, beside the model: {error}") from None
        engines.append(engine)
        stack.callback(engine.close)
    return engines


def _score_batch(engines: Sequence[PromptEngine], batch: Sequence[Window]) -> Iterator[dict[str, np.ndarray]]:
    """Figures of a batch's scored tokens, in order, a slice at a time."""
    # The last token of a window is only told, never read.
    prompts = [window.token_ids[:-1] for window in batch]
    targets = torch.tensor([token for w in batch for token in w.token_ids[-w.num_scored :]])
    targets = targets.to(engines[0].device)
    hidden = []
    for engine in engines:
        parts = zip(engine.hidden(prompts), batch, strict=True)
        hidden.append(torch.cat([rows[-window.num_scored :] for rows, window in parts]))
    # No more rows than a step has, so that the head is computed as in serving.
    step = min(engine.facts.max_num_batched_tokens for engine in engines)
    step = max(1, min(step, SLICE_ELEMENTS // engines[0].facts.vocab_size))
    for lo in range(0, len(targets), step):
        logits = [e.logits(rows[lo : lo + step]) for e, rows in zip(engines, hidden, strict=True)]
        yield score(logits[0], targets[lo : lo + step], *logits[1:])


def _check_ids(model: Subject, windows: Sequence[Window]) -> None:
    """Raises ConfigError: the tokenizer makes a token that the model lacks."""
    top = max(max(window.token_ids) for window in windows)
    if top >= model.model_config.vocab_size:
        raise ConfigError(
            f"the tokenizer of {model.name} makes token {top}, and the model has tokens below "
            f"{model.model_config.vocab_size}: give the model's own --tokenizer"
        )


def _check_finite(found: dict[str, np.ndarray], subjects: Sequence[Subject], done: int) -> None:
    """Raises ModelError: a figure that is no number would spoil all means."""
    owners = {"nll": subjects[0], "baseline_nll": subjects[-1], "kl": subjects[0]}
    for name, subject in owners.items():
        if name in found and not np.isfinite(found[name]).all():
            at = done + int(np.flatnonzero(~np.isfinite(found[name]))[0])
            raise ModelError(
                f"{subject.name}: the logits at scored token {at} (from 0) give no finite log-probability: "
                "its weights are broken or too large for its dtype (try --dtype float32)"
            )


def _describe(subject: Subject, engine: PromptEngine, computed: int) -> dict[str, Any]:
    """Settings of an engine without secrets, what runs by its own account, its memory, and its time in steps
    of `computed` tokens in all (the head apart)."""
    shown = [spec.name for spec in fields(engine.config) if spec.repr]
    return {
        "name": subject.name,
        "settings": {name: getattr(engine.config, name) for name in shown},
        "ran": engine.facts.summary,
        "max_model_len": engine.facts.max_model_len,
        "max_num_batched_tokens": engine.facts.max_num_batched_tokens,
        "forward_s": engine.seconds,
        "tokens_per_s": computed / engine.seconds if engine.seconds else 0.0,
        "weight_bytes": engine.facts.memory["weights"],
    }


def _records(figures: dict[str, np.ndarray], windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Means of each window's tokens."""
    records, lo = [], 0
    for window in windows:
        hi = lo + window.num_scored
        means = {name: float(values[lo:hi].mean()) for name, values in figures.items()}
        records.append(
            {"text": window.document, "first_token": window.first, "tokens": window.num_scored, **means}
        )
        lo = hi
    return records
