"""Keys and noise: exact integers everywhere, and random enough."""

import numpy as np
import pytest
import torch

from octavo.kernels.reference_sampling import gumbel_noise
from octavo.sampling.noise import choice_seed, row_keys, seed_state
from tests.sampling import oracle

SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)]


def uniforms(index: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor) -> np.ndarray:
    """The u behind the noise."""
    return np.exp(-np.exp(-gumbel_noise(index, k0, k1).double().numpy()))


def keys_of(seeds: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.tensor([seed_state(seed) for seed in seeds])
    return row_keys(states, torch.tensor(positions))


def chi_square(counts: np.ndarray) -> float:
    """Standardised statistic against equal expectations: about normal(0, 1) if they hold."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_keys_equal_those_of_plain_integers():
    for position in (0, 1, 77, 131071, 2**31 - 1):
        k0, k1 = keys_of(SEEDS, [position] * len(SEEDS))
        expected = [oracle.keys(seed, position) for seed in SEEDS]
        assert [
            (int(a) & oracle.MASK32, int(b) & oracle.MASK32) for a, b in zip(k0, k1, strict=True)
        ] == expected


def test_keys_are_the_same_in_numpy_and_torch():
    states = np.array([seed_state(seed) for seed in SEEDS])
    positions = np.arange(len(SEEDS)) * 1000
    for a, b in zip(
        row_keys(states, positions), row_keys(torch.tensor(states), torch.tensor(positions)), strict=True
    ):
        assert (a == b.numpy()).all()


def test_noise_equals_that_of_plain_integers():
    index = torch.tensor([0, 1, 2, 49151, 151935, 262143])
    for seed in SEEDS:
        k0, k1 = oracle.keys(seed, 9)
        got = gumbel_noise(index, torch.tensor([k0]), torch.tensor([k1])).double().numpy()
        u = np.array([oracle.uniform(int(v), k0, k1) for v in index])
        np.testing.assert_allclose(got, -np.log(-np.log(u)), rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("seeds", [[0], [7], list(range(32))])
def test_noise_is_uniform_over_the_vocabulary(seeds):
    k0, k1 = keys_of(seeds, [5] * len(seeds))
    u = uniforms(torch.arange(32768)[None], k0[:, None], k1[:, None]).ravel()
    assert abs(chi_square(np.histogram(u, 64, (0, 1))[0])) < 4


@pytest.mark.parametrize("step", ["vocabulary", "position", "seed"])
def test_neighbours_are_independent(step):
    """Joint distribution of the u of two neighbours: 16 x 16 equally likely cells."""
    size, v = 400, torch.arange(500)[None]
    count = list(range(size))
    zero = [3] * size
    seeds, positions = (count, zero) if step == "seed" else (zero, count)
    if step == "vocabulary":
        seeds, positions = count, count
    k0, k1 = keys_of(seeds, positions)
    u = uniforms(v, k0[:, None], k1[:, None])
    a, b = (u[:, :-1], u[:, 1:]) if step == "vocabulary" else (u[:-1], u[1:])
    cells = np.floor(a * 16).astype(int) * 16 + np.floor(b * 16).astype(int)
    assert abs(chi_square(np.bincount(cells.ravel(), minlength=256))) < 4
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01


def test_one_entry_is_uniform_over_positions():
    """The bits of one entry's u along a sequence are fair, high and low ones alike."""
    k0, k1 = row_keys(torch.full((50_000,), seed_state(11)), torch.arange(50_000))
    bits = np.floor(uniforms(torch.tensor([123]), k0, k1) * 256).astype(int)
    for bit in range(8):
        ones = ((bits >> bit) & 1).mean()
        assert abs(ones - 0.5) < 4 * 0.5 / np.sqrt(len(bits))


def test_choice_seeds():
    assert choice_seed(42, 0) == 42
    assert choice_seed(-1, 0) == 2**64 - 1
    assert choice_seed(42, 3) == oracle.splitmix64((42 + 3 * 0xD1B54A32D192ED03) & oracle.MASK64)
    seeds = {choice_seed(seed, index) for seed in range(100) for index in range(128)}
    assert len(seeds) == 100 * 128
    assert all(0 <= seed < 2**64 for seed in seeds)
