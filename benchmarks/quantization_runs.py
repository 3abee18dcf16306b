"""The runs of `benchmarks.quantization`: engines and their reference on the same windows of texts, with
figures kept batch by batch, so that a run that ended goes on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.eval.divergence import score
from octavo.eval.evaluate import SLICE_ELEMENTS
from octavo.eval.statistics import Blocks, summarize
from octavo.eval.subject import Subject
from octavo.eval.windows import Window, make_batches, make_windows
from octavo.quantization.capability import Hardware
from octavo.quantization.local_hardware import assumed

WINDOW = 512
ROWS = 1024  # of windows that are computed together
FP8_GPU = Hardware("cuda", (9, 0), name="a GPU with FP8")


class Runs(Protocol):
    """What computes windows."""

    ran: str

    def hidden(self, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
        """Final hidden states `[len(prompt), hidden_size]` of each."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden_size]` to `[rows, vocab_size]`."""


def subject(model: Path, tokenizer: Path, dequantize: bool = False) -> Subject:
    """A checkpoint in float32 arithmetic on the CPU."""
    return Subject(
        EngineConfig(
            model=str(model),
            tokenizer=str(tokenizer),
            dtype="float32",
            device="cpu",
            kv_cache_memory_bytes=256 << 20,
            quantization="none" if dequantize else None,
        )
    )


class Engine:
    """Octavo's own.

    Args:
        model: to be loaded.
        hardware: which one's arithmetic is computed, by the plain twins of its kernels; None: this CPU's.
    """

    def __init__(self, model: Subject, hardware: Hardware | None = None):
        self._hardware = hardware
        with self._on():
            self._engine = model.load(WINDOW, ROWS // WINDOW)
        self.ran = self._engine.facts.summary["weights"]

    def hidden(self, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
        with self._on():
            return self._engine.hidden(prompts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._engine.logits(hidden)

    def _on(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._hardware is None else assumed(self._hardware)


class OfTransformers:
    """A model of Transformers in float32, on the CPU; `checkpoint`: its folder."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def hidden(self, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [self._model.model(torch.tensor([p])).last_hidden_state[0] for p in prompts]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = self._model.lm_head(hidden)
        return out


class Reference(OfTransformers):
    """Transformers' model, quantized by compressed-tensors: what other programs make of a checkpoint.

    Args:
        base: the checkpoint that is not quantized.
        model: the same in FP8.
        weights, activations: which of the two are quantized.
    """

    def __init__(self, base: Path, model: Path, weights: bool, activations: bool):
        from compressed_tensors.quantization import disable_quantization

        super().__init__(model if weights else base)
        self._model(torch.tensor([[0]]))  # the first pass expands weights
        if not weights:
            _quantize_rows(self._model)
        elif not activations:
            for part in self._model.modules():
                disable_quantization(part)
        parts = [name for name, on in (("weights", weights), ("activations", activations)) if on]
        self.ran = f"Transformers with compressed-tensors, FP8 {' and '.join(parts)}"


def _quantize_rows(model: Any) -> None:
    """Let linear layers but the head round their rows to FP8, with a scale for each."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    rows = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], input_activations=rows)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)


class Figures:
    """What a row gave on a text, token by token; kept in a file.

    Args:
        path: the file.
        key: all that the figures depend on: those of another are begun anew.
    """

    def __init__(self, path: Path, key: str):
        self.path, self.key = path, key
        self.batches, self.lengths, self.ran = 0, np.zeros(0, np.int64), ""
        self.values: dict[str, np.ndarray] = {}
        if path.exists():
            with np.load(path) as saved:
                if str(saved["key"]) == key:
                    self.batches, self.lengths = int(saved["batches"]), saved["lengths"]
                    self.ran = str(saved["ran"])
                    self.values = {k[2:]: saved[k] for k in saved.files if k.startswith("v_")}

    def add(self, lengths: Sequence[int], values: dict[str, np.ndarray], ran: str) -> None:
        """Those of the next batch: scored tokens of its windows, and a value for each token."""
        self.batches, self.ran = self.batches + 1, ran
        self.lengths = np.concatenate((self.lengths, lengths)).astype(np.int64)
        self.values = {k: np.concatenate((self.values.get(k, v[:0]), v)) for k, v in values.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part.npz")
        named: dict[str, Any] = {f"v_{name}": value for name, value in self.values.items()}
        np.savez(part, key=self.key, batches=self.batches, lengths=self.lengths, ran=self.ran, **named)
        part.replace(self.path)


def summary_of(figures: Sequence[Figures], batches: int | None = None) -> dict[str, float]:
    """Figures of texts taken together: all that there are, or of the first batches of each."""
    lengths: list[int] = []
    values: dict[str, list[np.ndarray]] = {}
    for one in figures:
        windows = len(one.lengths) if batches is None else batches * (ROWS // WINDOW)
        kept = one.lengths[:windows]
        lengths += kept.tolist()
        for name, value in one.values.items():
            values.setdefault(name, []).append(value[: int(kept.sum())])
    whole = {name: np.concatenate(parts) for name, parts in values.items()}
    return {"num_tokens": sum(lengths), **summarize(whole, Blocks(lengths), (99.0,), 0)}


def batches_of(texts: Sequence[str], model: Subject, tokens: int) -> list[list[Window]]:
    """Windows of texts in batches, as many as hold so many scored tokens (or all)."""
    batches = make_batches(make_windows(model.encode(texts), model.prefix, WINDOW), ROWS, ROWS // WINDOW)
    kept: list[list[Window]] = []
    for batch in batches:
        if sum(w.num_scored for one in kept for w in one) >= tokens:
            break
        kept.append(batch)
    return kept


@dataclass
class Run:
    """A row: what computes it, and its figures of each text by the text's name."""

    make: Callable[[], Runs]
    figures: dict[str, Figures] = field(default_factory=dict)

    @functools.cached_property
    def engine(self) -> Runs:
        """Loaded when it is first asked for."""
        return self.make()


def measure(
    baseline: Run, runs: Sequence[Run], texts: dict[str, list[list[Window]]], on_batch: Callable[[], None]
) -> None:
    """Bring every run's figures to the end of the texts, all texts side by side.

    Args:
        texts: batches of windows by the texts' names.
        on_batch: called after each batch.
    """
    for i in range(max(map(len, texts.values()))):
        for text, batches in texts.items():
            lacking = [run for run in runs if i < len(batches) and run.figures[text].batches == i]
            if not lacking:
                continue
            batch = batches[i]
            theirs = scored_rows(baseline.engine, batch)
            for run in lacking:
                ours = scored_rows(run.engine, batch)
                values = scores(run.engine, ours, baseline.engine, theirs, batch)
                run.figures[text].add([w.num_scored for w in batch], values, run.engine.ran)
            on_batch()


def scored_rows(engine: Runs, batch: Sequence[Window]) -> torch.Tensor:
    """Final hidden states `[scored tokens, hidden_size]` that the scored tokens of a batch come from."""
    hidden = engine.hidden([window.token_ids[:-1] for window in batch])
    return torch.cat([rows[-window.num_scored :] for rows, window in zip(hidden, batch, strict=True)])


def scores(
    engine: Runs, ours: torch.Tensor, baseline: Runs, theirs: torch.Tensor, batch: Sequence[Window]
) -> dict[str, np.ndarray]:
    """Figures of a batch's scored tokens, from `scored_rows` of an engine and of the baseline."""
    targets = torch.tensor([token for w in batch for token in w.token_ids[-w.num_scored :]])
    step = max(1, SLICE_ELEMENTS // engine.logits(ours[:1]).shape[1])
    parts = []
    for lo in range(0, len(targets), step):
        rows = slice(lo, lo + step)
        parts.append(score(engine.logits(ours[rows]), targets[rows], baseline.logits(theirs[rows])))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
