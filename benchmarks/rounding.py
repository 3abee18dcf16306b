"""What ways of rounding a model's weights to 4 bits without data cost it, on the same windows of texts.

    python -m benchmarks.rounding --text english.txt --text chinese.txt
        [--model FILE]   a GGUF file, or a folder with safetensors; without: the default model
        [--tokens 3k]    scored of each text
        [--threads N]

The scale of a group is its largest magnitude over an `end`, the multiple of the scale that this is made. Ends
are tried, and the one of least error is taken, by a sum of some power of errors. A way may be signed: the
scale is below 0 where the largest number is above it, so that this becomes the code -8 rather than 7.

The model is Transformers', in float32. Results go into `benchmarks/quantization.json` and
`benchmarks/quantization.md`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quantization import FOLDER, located, shown
from benchmarks.quantization_page import page
from benchmarks.quantization_runs import OfTransformers, batches_of, scored_rows, scores, subject
from octavo.config import parse_amount
from octavo.eval.statistics import Blocks, summarize
from octavo.eval.texts import read_texts
from octavo.quantization.rounding import QUICK, THOROUGH, round_matrix, spread
from octavo.quantization.scheme import WeightScheme

OURS: dict[str, Sequence[float]] = {
    "largest over 7.5": (),
    "`octavo quantize`": THOROUGH,
    "`int4_weight_only`": QUICK,
}
"""By `round_matrix`, with these ends; the first is what others are compared with."""


def _shares(most: float, least: float, step: float) -> list[float]:
    """Ends of these shares of the scale that is the largest magnitude over 7.5."""
    return [7.5 / share for share in np.arange(most, least - step / 2, -step)]


WAYS: dict[str, tuple[float, Sequence[float], bool]] = {
    "largest over 7": (2.0, (7.0,), False),
    "squares": (2.0, _shares(1.08, 0.66, 0.02), False),
    "powers of 2.4, down to 0.81 (llm-compressor's mse)": (2.4, _shares(1.0, 0.81, 0.01), False),
    "fourth powers": (4.0, _shares(1.08, 0.8, 0.02), False),
    "signed, squares": (2.0, THOROUGH, True),
    "signed, largest over 8": (2.0, (8.0,), True),
}
"""Power, ends, and whether signed."""


def rounded(
    weight: torch.Tensor, group: int, power: float, ends: Sequence[float], signed: bool
) -> torch.Tensor:
    """float32 `[N, K]` of what a way makes of `weight`, whose scales are of its type."""
    groups = weight.float().unflatten(1, (-1, group))
    largest = groups.abs().amax(2, keepdim=True).clamp_min(1e-9)
    if signed:
        above = groups.amax(2, keepdim=True) > -groups.amin(2, keepdim=True)
        largest = torch.where(above, -largest, largest)
    best, least = groups, torch.full_like(largest, torch.inf)
    for end in ends:
        scale = (largest / end).to(weight.dtype).float()
        made = (groups / scale).round_().clamp_(-8, 7).mul_(scale)
        error = (made - groups).abs_().pow_(power).sum(2, keepdim=True)
        better = error < least
        best, least = torch.where(better, made, best), torch.where(better, error, least)
    return best.flatten(1)


class Rounded(OfTransformers):
    """Transformers' model, whose matrices but the head are rounded in one way after another.

    Args:
        base: the checkpoint in bfloat16.
        group: columns of a group.
    """

    ran = "Transformers"

    def __init__(self, base: Path, group: int):
        super().__init__(base)
        named = self._model.named_parameters()
        self._matrices = {name: p for name, p in named if name.endswith("_proj.weight")}
        self._weights = {name: p.detach().to(torch.bfloat16) for name, p in self._matrices.items()}
        self._scheme = WeightScheme("int4", "group", group)

    def take(self, way: str) -> None:
        """Round the weights in this way."""
        with torch.no_grad():
            for name, matrix in self._matrices.items():
                matrix.copy_(self._made(name, self._weights[name], way))

    def _made(self, name: str, weight: torch.Tensor, way: str) -> torch.Tensor:
        if way in WAYS:
            assert self._scheme.group_size is not None
            return rounded(weight, self._scheme.group_size, *WAYS[way])
        made = round_matrix(
            name, weight, self._scheme, packed=False, device=weight.device, scale_dtype=weight.dtype,
            ends=OURS[way],
        )  # fmt: skip
        return made["weight"].float() * spread(made["weight_scale"], self._scheme, *weight.shape)


def row_of(values: dict[str, np.ndarray], plain: dict[str, np.ndarray], blocks: Blocks) -> dict[str, float]:
    """A way's figures, and how far its perplexity and its divergence are from the plain way's, with paired
    standard errors; `values` as `scores` gives them, of all tokens."""
    nll = blocks.mean(values["nll"] - plain["nll"])
    kl = blocks.mean(values["kl"] - plain["kl"])
    mean = float(plain["kl"].mean())
    return {
        **shown({"num_tokens": len(values["nll"]), **summarize(values, blocks, (99.0,), 0)}),
        "plain_perplexity_ratio": math.exp(nll[0]),
        "plain_perplexity_ratio_se": math.exp(nll[0]) * nll[1],
        "plain_kl_ratio": 1 + kl[0] / mean,
        "plain_kl_ratio_se": kl[1] / mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", action="append", required=True, metavar="FILE")
    parser.add_argument("--model", metavar="FILE")
    parser.add_argument("--tokens", default="3k")
    parser.add_argument("--threads", type=int, metavar="N")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokens = parse_amount(args.tokens, "tokens")
    assert isinstance(tokens, int)
    given, name, _, base, group = located(args.model)
    tokens_of = subject(base, given)
    batches = [b for file in args.text for b in batches_of(read_texts(file).texts, tokens_of, tokens)]
    blocks = Blocks([window.num_scored for batch in batches for window in batch])
    engine = Rounded(base, group)
    before = [scored_rows(engine, batch) for batch in batches]
    rows: dict[str, dict[str, float]] = {}
    plain: dict[str, np.ndarray] | None = None
    for way in (*OURS, *WAYS):
        engine.take(way)
        parts = [
            scores(engine, scored_rows(engine, batch), engine, theirs, batch)
            for batch, theirs in zip(batches, before, strict=True)
        ]
        values = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        plain = values if plain is None else plain
        rows[way] = row_of(values, plain, blocks)
        print(way, rows[way], flush=True)
        saved = FOLDER / "quantization.json"
        results: dict[str, Any] = json.loads(saved.read_text())
        results["models"][name]["rounding"] = rows
        saved.write_text(json.dumps(results, indent=1) + "\n")
        (FOLDER / "quantization.md").write_text(page(results))


if __name__ == "__main__":
    main()
