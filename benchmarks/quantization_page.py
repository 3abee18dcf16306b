"""The page of `benchmarks.quantization`, from its figures."""

from __future__ import annotations

from typing import Any

ROWS: dict[str, tuple[str, str]] = {
    "FP8_DYNAMIC": ("FP8 weights and activations", "0.5%"),
    "FP8_DYNAMIC, weights": ("FP8 weights alone", ""),
    "W8A8": ("int8 weights and activations", "1%"),
    "W8A16": ("int8 weights", ""),
    "W4A16": ("int4 weights, by `octavo quantize`", "no worse than llm-compressor"),
    "W4A16, plain": ("int4 weights, by llm-compressor's round to nearest", ""),
}
"""Name, what it is, and the rise of perplexity that is wanted."""
REFERENCES = {
    "FP8_DYNAMIC, reference": "both",
    "FP8_DYNAMIC, reference, weights": "weights alone",
    "FP8_DYNAMIC, reference, activations": "activations alone",
}
"""The same by Transformers and compressed-tensors, and which of the two are in FP8."""
TEXTS = {
    "dec1e0ec": "Tiny Shakespeare, its first 130,000 characters",
    "5779dc4b": "53,172 characters of LibreOffice's help in Chinese (Debian's libreoffice-help-zh-cn 7.4.7)",
}
"""What texts are, by the beginning of their SHA-256."""


def page(results: dict[str, Any]) -> str:
    """The page of what was measured."""
    lines = [
        "# Quality of quantized checkpoints",
        "",
        "Models are expanded to bfloat16, and that is quantized by `octavo quantize`, with lm_head left",
        "alone. Arithmetic is float32's on a CPU; the baseline of every figure is the bfloat16 checkpoint on",
        "the same windows of 512 tokens. Written by `python -m benchmarks.quantization`.",
        "",
        "A GGUF file of 4 bits holds weights that were rounded before, in smaller groups of another form:",
        "what is measured of W4A16 is a second rounding, whose grid is not the first one's.",
        "",
        "The rise of perplexity is that over all tokens, with its standard error; wanted rises are goals,",
        "and are met or not. They are meant for 50,000 tokens and more: a row of fewer is a first look.",
    ]
    for name, model in results["models"].items():
        lines += ["", f"## {name}", "", *_rises(model), "", *_texts(model), "", *_ran(model)]
        if "reference" in model:
            lines += ["", *_reference(name, model["reference"])]
        if "rounding" in model:
            lines += ["", *_rounding(name, model)]
    lines += ["", "## Texts", ""]
    lines += [f"- {one['name']}: {_what(one['sha256'])}" for one in results["texts"].values()]
    return "\n".join(lines) + "\n"


def _what(sha256: str) -> str:
    known = next((what for start, what in TEXTS.items() if sha256.startswith(start)), "a file")
    return f"{known} (SHA-256 `{sha256}`)"


def _rises(model: dict[str, Any]) -> list[str]:
    lines = [
        f"{model['about']} Groups of 4 bits have {model['group']} columns.",
        "",
        "| scheme | what | rise of perplexity | wanted | tokens |",
        "|---|---|---|---|---|",
    ]
    for row, (what, wanted) in ROWS.items():
        if row in model["rows"]:
            found = model["rows"][row]["all"]
            verdict = f"{wanted}: {_verdict(row, model['rows'])}" if wanted else ""
            lines.append(f"| {row} | {what} | {_rise(found)} | {verdict} | {found['num_tokens']:,} |")
    return lines


def _rise(found: dict[str, Any]) -> str:
    return f"{found['perplexity_ratio'] - 1:+.2%} ± {found['perplexity_ratio_se']:.2%}"


def _verdict(row: str, rows: dict[str, Any]) -> str:
    ratio = rows[row]["all"]["perplexity_ratio"]
    if row == "W4A16":
        if "W4A16, plain" not in rows:
            return "not compared"
        return "met" if ratio <= rows["W4A16, plain"]["all"]["perplexity_ratio"] else "missed"
    return "met" if ratio - 1 <= float(ROWS[row][1].rstrip("%")) / 100 else "missed"


def _texts(model: dict[str, Any]) -> list[str]:
    lines = [
        "By text (ratio: of perplexities, with its paired standard error; KL in nats):",
        "",
        "| scheme | text | bfloat16 | quantized | ratio | mean KL | 99th percentile | same likeliest token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in ROWS if row in model["rows"]):
        for name, text in model["rows"][row]["texts"].items():
            lines.append(
                f"| {row} | {name} | {text['baseline_perplexity']:.3f} | {text['perplexity']:.3f} "
                f"| {text['perplexity_ratio']:.4f} ± {text['perplexity_ratio_se']:.4f} "
                f"| {text['kl_mean']:.4f} | {text['kl_p99']:.3f} | {text['top1_agreement']:.1%} |"
            )
    return lines


def _ran(model: dict[str, Any]) -> list[str]:
    lines = ["What ran, by the engine's own account:", ""]
    return lines + [f"- {row}: {model['rows'][row]['ran']}" for row in ROWS if row in model["rows"]]


def _reference(name: str, found: dict[str, Any]) -> list[str]:
    errors = found["errors"]
    tokens = next(iter(found["rows"].values()))["num_tokens"]
    lines = [
        f"### What bounds FP8 of {name}",
        "",
        "The same checkpoint in Transformers, quantized by compressed-tensors, on the same "
        f"{tokens:,} tokens:",
        "",
        "| FP8 | by | rise of perplexity | mean KL |",
        "|---|---|---|---|",
    ]
    who = {"FP8_DYNAMIC": ("both", "Octavo")}
    who |= {row: (what, "compressed-tensors") for row, what in REFERENCES.items()}
    for row, (what, by) in who.items():
        if row in found["rows"]:
            one = found["rows"][row]
            lines.append(f"| {what} | {by} | {_rise(one)} | {one['kl_mean']:.4f} |")
    wanted = 1 + float(ROWS["FP8_DYNAMIC"][1].rstrip("%")) / 100
    alone = [
        found["rows"][row] for row, what in REFERENCES.items() if what != "both" and row in found["rows"]
    ]
    if alone and all(one["perplexity_ratio"] > wanted for one in alone):
        lines += ["", "Each of the two alone costs more than is wanted of both."]
    return [
        *lines,
        "",
        "E4M3 has 3 bits of mantissa: it rounds each number by a share of itself, which finer scales hardly",
        "change. Root mean square of the change of this model's matrices, of that of the weights:",
        f"{errors['fp8, rows']:.2%} with a scale for each row, {errors['fp8, groups']:.2%} with one for",
        f"every 32 columns; by int8 with a scale for each row {errors['int8, rows']:.2%}.",
    ]


def _rounding(name: str, model: dict[str, Any]) -> list[str]:
    rows = model["rounding"]
    tokens = next(iter(rows.values()))["num_tokens"]
    lines = [
        f"### Ways of rounding {name} to 4 bits",
        "",
        f"Groups of {model['group']} columns, {tokens:,} tokens. By `python -m benchmarks.rounding`, which",
        "says what the ways are. The last two columns compare with the first row (paired standard errors).",
        "",
        "| way | rise of perplexity | mean KL | perplexity | KL |",
        "|---|---|---|---|---|",
    ]
    for way, found in rows.items():
        against = " | | |"
        if found is not next(iter(rows.values())):
            against = (
                " | "
                + " | ".join(
                    f"{found[f'plain_{what}_ratio'] - 1:+.1%} ± {found[f'plain_{what}_ratio_se']:.1%}"
                    for what in ("perplexity", "kl")
                )
                + " |"
            )
        rise = f"{found['perplexity_ratio'] - 1:+.1%}"
        lines.append(f"| {way} | {rise} | {found['kl_mean']:.4f}{against}")
    return lines
