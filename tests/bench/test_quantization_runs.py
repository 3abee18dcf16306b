"""The benchmark of quantized checkpoints: runs that are cut short, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quantization_page import REFERENCES, page
from benchmarks.quantization_runs import ROWS, WINDOW, Figures, Run, measure, summary_of
from benchmarks.rounding import OURS, WAYS, Rounded, rounded, row_of
from octavo.eval.statistics import Blocks
from octavo.eval.windows import Window, make_batches, make_windows
from tests import tiny

VOCAB = 11


class Fake:
    """Logits that depend on the token, and noise on them."""

    ran = "a fake"

    def __init__(self, noise: float):
        self.noise, self.batches = noise, 0

    def hidden(self, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
        self.batches += 1
        return [torch.tensor(prompt)[:, None].float() for prompt in prompts]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sin(hidden * torch.arange(1, VOCAB + 1)) + self.noise * torch.cos(hidden)


def texts() -> dict[str, list[list[Window]]]:
    """Of 3 and 2 batches, the last of each a short one."""
    random = torch.Generator().manual_seed(0)
    found = {}
    for name, size in (("a.txt", 2 * ROWS + 700), ("b.txt", ROWS + 40)):
        ids = torch.randint(0, VOCAB, (size,), generator=random).tolist()
        found[name] = make_batches(make_windows([ids], [], WINDOW), ROWS, ROWS // WINDOW)
    return found


def run_in(folder: Path, row: str, noise: float, key: str = "same") -> Run:
    run = Run(lambda: Fake(noise))
    run.figures = {name: Figures(folder / f"{row} of {name}.npz", key) for name in texts()}
    return run


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    whole = [run_in(tmp_path / "whole", row, noise) for row, noise in (("x", 0.1), ("y", 0.3))]
    measure(run_in(tmp_path, "base", 0.0), whole, texts(), lambda: None)
    calls: list[int] = []

    def ends() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(run_in(tmp_path, "base", 0.0), [run_in(tmp_path / "cut", "x", 0.1)], texts(), ends)
    parts = [run_in(tmp_path / "cut", row, noise) for row, noise in (("x", 0.1), ("y", 0.3))]
    assert [f.batches for f in parts[0].figures.values()] == [2, 1]
    measure(run_in(tmp_path, "base", 0.0), parts, texts(), lambda: None)
    engines: list[Any] = [run.engine for run in parts]
    assert [engine.batches for engine in engines] == [2, 5]
    for ours, theirs in zip(parts, whole, strict=True):
        assert summary_of(list(ours.figures.values())) == summary_of(list(theirs.figures.values()))
    found = summary_of(list(parts[0].figures.values()))
    assert found["num_tokens"] == sum(w.num_scored for b in texts().values() for one in b for w in one)
    assert found["kl_mean"] > 0 and found["perplexity_ratio_se"] > 0
    first = summary_of(list(parts[0].figures.values()), 1)
    assert first["num_tokens"] == sum(w.num_scored for b in texts().values() for w in b[0])
    other = run_in(tmp_path / "cut", "x", 0.1, "another checkpoint")
    assert [f.batches for f in other.figures.values()] == [0, 0]


def test_the_page() -> None:
    one = {
        "num_tokens": 50_000, "perplexity": 2.1, "baseline_perplexity": 2.0, "perplexity_ratio": 1.004,
        "perplexity_ratio_se": 0.001, "kl_mean": 0.01, "kl_p99": 0.2, "top1_agreement": 0.98,
    }  # fmt: skip
    worse = one | {"perplexity_ratio": 1.02}
    row = {"ran": "W8A8", "texts": {"a.txt": one}}
    rows = {"FP8_DYNAMIC": {**row, "all": one}, "W8A8": {**row, "all": worse}, "W4A16": {**row, "all": worse}}
    errors = {"fp8, rows": 0.026, "fp8, groups": 0.026, "int8, rows": 0.009}
    model = {"about": "7 million parameters.", "group": 64, "rows": rows}
    reference: dict[str, Any] = {"errors": errors, "rows": dict.fromkeys(("FP8_DYNAMIC", *REFERENCES), one)}
    other = {"plain_perplexity_ratio": 0.9, "plain_kl_ratio": 0.7}
    ways = {"a": one, "b": one | other | {f"{name}_se": 0.02 for name in other}}
    results = {
        "models": {"tiny": {**model, "reference": reference}, "other": {**model, "rounding": ways}},
        "texts": {"ab": {"name": "a.txt", "sha256": "ab"}},
    }
    lines = page(results).splitlines()
    assert lines.count("## tiny") == lines.count("## other") == 1
    assert "| FP8_DYNAMIC | FP8 weights and activations | +0.40% ± 0.10% | 0.5%: met | 50,000 |" in lines
    assert "| W8A8 | int8 weights and activations | +2.00% ± 0.10% | 1%: missed | 50,000 |" in lines
    assert any(line.startswith("| W4A16 |") and "llm-compressor: not compared |" in line for line in lines)
    assert "| activations alone | compressed-tensors | +0.40% ± 0.10% | 0.0100 |" in lines
    assert "| a | +0.4% | 0.0100 | | |" in lines
    assert "| b | +0.4% | 0.0100 | -10.0% ± 2.0% | -30.0% ± 2.0% |" in lines
    told = "Each of the two alone costs more than is wanted of both."
    assert told not in lines
    reference["rows"] = dict.fromkeys(("FP8_DYNAMIC", *REFERENCES), worse)
    assert told in page(results).splitlines()


def test_ways_of_rounding_are_what_they_say() -> None:
    weight = torch.tensor(
        [[0.8125, -0.4, 0.33, 0.1] * 2 + [-0.6875, 0.1, 0.0, 0.0] * 2], dtype=torch.bfloat16
    )
    scale = torch.tensor([0.8125 / 7.5, 0.6875 / 7.5], dtype=torch.bfloat16).float().repeat_interleave(8)
    plain = (weight.float() / scale).round().clamp(max=7) * scale
    assert torch.equal(rounded(weight, 8, 2.0, (7.5,), False), plain)
    signed = rounded(weight, 8, 2.0, (8.0,), True)
    assert torch.equal(signed[0, [0, 8]], weight[0, [0, 8]].float())  # -8 times a scale that is exact
    for power, ends, sign in WAYS.values():
        made = rounded(weight, 8, power, ends, sign)
        assert not torch.equal(made, weight.float()) and float((made - weight.float()).abs().max()) < 0.2


def test_ways_are_compared_in_pairs() -> None:
    blocks = Blocks([128] * 4)
    random = np.random.default_rng(0)
    plain = {name: random.random(512) for name in ("nll", "baseline_nll", "kl", "top1", "top5")}
    same = row_of(plain, plain, blocks)
    assert same["plain_perplexity_ratio"] == same["plain_kl_ratio"] == 1.0
    assert same["plain_perplexity_ratio_se"] == same["plain_kl_ratio_se"] == 0.0
    other = row_of(plain | {"nll": plain["nll"] + np.log(1.5), "kl": plain["kl"] * 0.5}, plain, blocks)
    assert other["plain_perplexity_ratio"] == pytest.approx(1.5)
    assert other["plain_kl_ratio"] == pytest.approx(0.5) and other["plain_kl_ratio_se"] > 0


def test_a_model_is_rounded_in_one_way_after_another() -> None:
    engine = Rounded(tiny.checkpoint("llama"), 32)
    prompts, found = [[1, 2, 3, 4]], {}
    before = engine.logits(engine.hidden(prompts)[0])
    for way in (*OURS, *WAYS, next(iter(OURS))):
        engine.take(way)
        after = engine.logits(engine.hidden(prompts)[0])
        assert torch.equal(found.setdefault(way, after), after)
        assert 1e-3 < float((after - before).std() / before.std()) < 1.0, way
    assert len({float(one.sum()) for one in found.values()}) == len(OURS) + len(WAYS)
