"""An evaluation as a table, and as what is saved."""

from __future__ import annotations

import math
import sys
from typing import Any

from octavo.bench.report import Report, Row, table
from octavo.eval.divergence import TOP
from octavo.eval.evaluate import PERCENTILES, Evaluation
from octavo.eval.texts import TextFile

_LIBRARIES = ("torch", "numpy", "tokenizers", "transformers", "triton", "gguf")


def make_report(evaluation: Evaluation, file: TextFile) -> Report:
    """All of an evaluation, with the text's digest and the versions of the libraries that took part."""
    versions = {
        name: str(sys.modules[name].__version__)
        for name in _LIBRARIES
        if hasattr(sys.modules.get(name), "__version__")
    }
    text = {"path": file.path, "sha256": file.sha256}
    settings = {"text": text, **evaluation.settings, "versions": versions}
    return Report("eval", settings, evaluation.summary, evaluation.windows, render(evaluation))


def render(evaluation: Evaluation) -> str:
    """Named figures, each with its standard error, one a line."""
    found, settings = evaluation.summary, evaluation.settings
    compared = settings["baseline"] is not None
    heads: list[Row] = [("Model", _engine(settings["model"]))]
    if compared:
        heads.append(("Baseline", _engine(settings["baseline"])))
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
        ],
    )


def plus_minus(value: float, error: float | None = None) -> str:
    """A figure with its standard error, which has two digits; NaN is none.

    >>> plus_minus(12.34567, 0.01234)
    '12.346 ± 0.012'
    """
    if not math.isfinite(value):
        return "-"
    small = 0 < abs(value) < 1e-3
    if error is None or not math.isfinite(error) or error == 0:
        return f"{value:.3e}" if small else f"{value:.6g}"
    if small:
        return f"{value:.2e} ± {error:.1e}"
    digits = min(max(0, 1 - math.floor(math.log10(error))), 8)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _figure(found: dict[str, Any], name: str, scale: float = 1.0) -> str:
    return plus_minus(found[name] * scale, found[f"{name}_se"] * scale)


def _engine(described: dict[str, Any]) -> str:
    ran = described["ran"]
    return f"{described['name']} ({ran['dtype']}, {ran['device'].partition(' ')[0]})"
