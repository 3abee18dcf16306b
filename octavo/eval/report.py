"""An evaluation as a table, and as what is saved."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from octavo.bench.report import Report, Row, table
from octavo.eval.divergence import TOP
from octavo.eval.evaluate import PERCENTILES, Evaluation
from octavo.eval.texts import TextFile
from octavo.eval.thresholds import Thresholds

_LIBRARIES = ("torch", "numpy", "tokenizers", "transformers", "triton", "gguf")


def make_report(evaluation: Evaluation, file: TextFile, thresholds: Thresholds | None = None) -> Report:
    """All of an evaluation, with the text's digest and the versions of the libraries that took part; failed
    where a threshold is not kept."""
    versions = {
        name: str(sys.modules[name].__version__)
        for name in _LIBRARIES
        if hasattr(sys.modules.get(name), "__version__")
    }
    text = {"path": file.path, "sha256": file.sha256}
    settings = {"text": text, **evaluation.settings, "versions": versions}
    judged = thresholds.judge(evaluation.summary) if thresholds is not None and thresholds.given else {}
    summary = {**evaluation.summary, "thresholds": judged} if judged else evaluation.summary
    failed = not all(one["kept"] for one in judged.values())
    return Report("eval", settings, summary, evaluation.windows, render(evaluation, judged), failed)


_BOUNDS = {"max_ppl_rise": ("Perplexity's rise", "%"), "max_kl": ("Mean divergence", ""),
           "min_agreement": ("Likeliest token the same", "%")}  # fmt: skip


def _judgement(judged: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    for name, one in judged.items():
        label, unit = _BOUNDS[name]
        found, bound = (f"{one[key] * (100.0 if unit else 1.0):.4g}{unit}" for key in ("found", "bound"))
        wanted = ("at least " if name.startswith("min") else "at most ") + bound
        rows.append((label, f"{found}, {wanted}: {'kept' if one['kept'] else 'FAILED'}"))
    return rows


def render(evaluation: Evaluation, judged: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Named figures, each with its standard error, one a line; then what became of thresholds."""
    found, settings = evaluation.summary, evaluation.settings
    compared = settings["baseline"] is not None
    heads = _engine("Model", settings["model"])
    if compared:
        heads += _engine("Baseline", settings["baseline"])
    heads += [("Scored tokens", found["num_tokens"]), ("Windows", found["num_windows"])]
    heads.append(("Duration (s)", found["duration_s"]))
    if not compared:
        return table("Evaluation", [("", heads), ("", [("Perplexity", _figure(found, "perplexity"))])])
    perplexity: list[Row] = [
        ("Model", _figure(found, "perplexity")),
        ("Baseline", _figure(found, "baseline_perplexity")),
        ("Ratio (paired)", _figure(found, "perplexity_ratio")),
    ]
    divergence: list[Row] = [("Mean", _figure(found, "kl_mean"))]
    divergence += [(f"{p:g}th percentile", _figure(found, f"kl_p{p:g}")) for p in PERCENTILES]
    divergence.append(("Largest", plus_minus(found["kl_max"])))
    agreement: list[Row] = [
        ("Likeliest token the same", _figure(found, "top1_agreement", 100.0)),
        (f"Likeliest {TOP} in common", _figure(found, "top5_overlap", 100.0)),
    ]
    return table(
        "Evaluation",
        [
            ("", heads),
            ("Perplexity", perplexity),
            ("KL divergence from the baseline (nats)", divergence),
            ("Agreement (%)", agreement),
            ("Thresholds", _judgement(judged or {})),
        ],
    )


def plus_minus(value: float, error: float | None = None) -> str:
    """A figure of five digits or more with its standard error, which has two; NaN is none.

    >>> plus_minus(12.34567, 0.001234)
    '12.3457 ± 0.0012'
    """
    if not math.isfinite(value):
        return "-"
    if 0 < abs(value) < 1e-3:
        shown = f"{value:.3e}"
        return shown if not error or not math.isfinite(error) else f"{shown} ± {error:.1e}"
    if not error or not math.isfinite(error):
        return f"{value:.6g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    own = 4 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(digits, own, 0), 6)}f} ± " + (
        f"{error:.{digits}f}" if digits <= 6 else f"{error:.1e}"
    )


def _figure(found: dict[str, Any], name: str, scale: float = 1.0) -> str:
    return plus_minus(found[name] * scale, found[f"{name}_se"] * scale)


def _engine(label: str, described: dict[str, Any]) -> list[Row]:
    """What ran, by its own account: not what was asked for."""
    ran = described["ran"]
    rows: list[Row] = [(label, f"{described['name']} ({ran['dtype']}, {ran['device'].partition(' ')[0]})")]
    rows += [("  weights", ran["weights"])] if "weights" in ran else []
    return [
        *rows,
        ("  memory of weights (MB)", described["weight_bytes"] / 1e6),
        ("  forward pass (tokens/s)", described["tokens_per_s"]),
    ]
