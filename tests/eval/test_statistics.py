"""Standard errors against the spread of figures over many simulated texts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.eval.divergence import score
from octavo.eval.report import plus_minus
from octavo.eval.statistics import BLOCK, Blocks, summarize

LENGTHS = [300, BLOCK, 1, 511, 511, 77]


def text(generator: np.random.Generator) -> np.ndarray:
    """Losses that neighbours share: each block has a level of its own, as easy and hard passages do."""
    blocks = Blocks(LENGTHS)
    levels = generator.normal(0.0, 0.5, len(blocks))
    return 3.0 + np.repeat(levels, blocks.sizes) + generator.exponential(1.0, sum(LENGTHS))


def test_blocks_do_not_cross_windows():
    blocks = Blocks(LENGTHS)
    assert blocks.sizes.tolist() == [128, 128, 44, 128, 1, 128, 128, 128, 127, 128, 128, 128, 127, 77]
    assert len(blocks) == 14


def test_the_error_of_a_mean_is_its_spread_and_not_that_of_independent_tokens():
    generator = np.random.default_rng(0)
    blocks = Blocks(LENGTHS)
    texts = [text(generator) for _ in range(1000)]
    found = [blocks.mean(values) for values in texts]
    assert [mean for mean, _ in found] == pytest.approx([values.mean() for values in texts])
    spread = np.std([mean for mean, _ in found])
    told = math.sqrt(np.mean([error**2 for _, error in found]))
    assert told == pytest.approx(spread, rel=0.1)
    independent = np.mean([values.std() / math.sqrt(len(values)) for values in texts])
    assert independent < 0.4 * spread


def test_the_bootstrap_error_of_percentiles_is_their_spread():
    generator = np.random.default_rng(1)
    blocks = Blocks(LENGTHS)
    texts = [text(generator) for _ in range(60)]
    spread = np.std([np.percentile(values, [50.0, 90.0]) for values in texts], axis=0)
    errors = np.array([blocks.percentile_errors(values, [50.0, 90.0], 7) for values in texts])
    assert np.sqrt((errors**2).mean(0)) == pytest.approx(spread, rel=0.25)
    assert blocks.percentile_errors(texts[0], [50.0], 7) == blocks.percentile_errors(texts[0], [50.0], 7)
    assert blocks.percentile_errors(texts[0], [50.0], 7) != blocks.percentile_errors(texts[0], [50.0], 8)


def test_a_single_block_has_no_error():
    figures = {"nll": np.full(50, 2.0)}
    found = summarize(figures, Blocks([50]), [99.0], 0)
    assert found["perplexity"] == pytest.approx(math.exp(2.0))
    assert math.isnan(found["perplexity_se"])
    assert math.isnan(Blocks([50]).percentile_errors(figures["nll"], [99.0], 0)[0])


def test_the_ratio_is_paired():
    """What makes a token hard for both models is no noise of their difference."""
    generator = np.random.default_rng(2)
    base = text(generator)
    nll = base + 0.01 + generator.normal(0.0, 0.01, len(base))
    ones = np.ones_like(base)
    figures = {"nll": nll, "baseline_nll": base, "kl": 0.01 * ones, "top1": ones, "top5": ones}
    found = summarize(figures, Blocks(LENGTHS), [50.0], 0)
    assert found["perplexity_ratio"] == pytest.approx(found["perplexity"] / found["baseline_perplexity"])
    assert found["perplexity_ratio"] == pytest.approx(math.exp(0.01), abs=4 * found["perplexity_ratio_se"])
    assert found["perplexity_ratio_se"] < 0.01 * found["perplexity_se"] / found["perplexity"]


def test_scores_of_known_distributions():
    import torch

    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.25, 0.5, 0.0]], dtype=torch.float64)
    found = score(q.log() + 3.0, torch.tensor([2]), p.log() - 1.0)
    assert found["nll"][0] == pytest.approx(math.log(2.0))
    assert found["baseline_nll"][0] == pytest.approx(math.log(4.0))
    assert found["kl"][0] == pytest.approx(0.5 * math.log(2.0) + 0.25 * math.log(0.5))
    assert found["top1"][0] == 0.0 and found["top5"][0] == 1.0
    # The model rules out what the baseline does not.
    assert score(torch.tensor([[0.0, -math.inf]]), torch.tensor([0]), torch.zeros(1, 2))["kl"][0] == math.inf


def test_overlap_of_the_five_likeliest():
    import torch

    logits = torch.arange(20.0).flip(0)[None]
    other = logits.clone()
    other[0, 0], other[0, 1] = -1.0, -2.0  # 0 and 1 leave the five likeliest: 5 and 6 come in
    found = score(other, torch.tensor([0]), logits)
    assert found["top5"][0] == pytest.approx(0.6)
    assert found["top1"][0] == 0.0


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (12.34567, 0.01234, "12.346 ± 0.012"),
        (12.34567, 0.001234, "12.3457 ± 0.0012"),
        (12.34567, 1.9, "12.346 ± 1.9"),
        (1234.56, 56.7, "1234.6 ± 57"),
        (1.5e-7, 2.5e-9, "1.500e-07 ± 2.5e-09"),
        (1.5e-7, 0.0, "1.500e-07"),
        (0.0, 0.01, "0.000 ± 0.010"),
        (1.0, 0.0, "1"),
        (0.0, 0.0, "0"),
        (2.0, math.nan, "2"),
        (math.nan, math.nan, "-"),
        (0.5, 1e-12, "0.500000 ± 1.0e-12"),
    ],
)
def test_figures_show_two_digits_of_their_error_and_five_of_their_own(value, error, shown):
    assert plus_minus(value, error) == shown
