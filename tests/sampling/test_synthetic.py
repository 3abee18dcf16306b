"""Synthetic acceptance: chance alone judges drafts, by the seed and the position, as often as was asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplingState
from octavo.sampling.verifier import Verifier, VerifyOutput
from octavo.sampling_params import SamplingParams
from tests.sampling import oracle

VOCAB, RATES = 12, [0.8, 0.6, 0.0, 1.0]


def judge(
    drafts: list[list[int]], seeds: list[int], known: list[int], rates: list[float], **params: Any
) -> tuple[VerifyOutput, torch.Tensor]:
    """Of requests whose logits are the same in every row; these, and the verdict."""
    n, length = len(drafts), max(known) + len(rates) + 1
    state = SamplingState(n, VOCAB, length, "cpu")
    table = torch.zeros(n, length, dtype=torch.int32)
    for slot, draft in enumerate(drafts):
        request = SamplingParams(max_tokens=None, **params)
        state.add(oracle.admission(slot, [1], 1, request, seeds[slot]))
        table[slot, known[slot] : known[slot] + len(draft)] = torch.tensor(draft, dtype=torch.int32)
    counts = np.array([len(draft) for draft in drafts])
    row = torch.from_numpy(np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32))
    slots = np.arange(n, dtype=np.int32)
    out = Verifier(Sampler(state), rates)(
        row.repeat(int(counts.sum()) + n, 1),
        slots,
        torch.from_numpy(slots),
        torch.tensor(known),
        table,
        max_known=np.array(known),
        num_drafts=counts,
    )
    return out, row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_verdict_is_that_of_the_seed_and_the_position(temperature: float):
    n = 4000
    rng = np.random.default_rng(1)
    counts = rng.integers(0, len(RATES) + 1, n)
    # What the model would say is among them: that alone makes nothing stand.
    drafts = [rng.integers(0, VOCAB, count).tolist() for count in counts]
    seeds, known = list(range(n)), rng.integers(1, 50, n).tolist()
    out, row = judge(drafts, seeds, known, RATES, temperature=temperature)
    tried, stood = np.zeros(len(RATES)), np.zeros(len(RATES))
    for i, draft in enumerate(drafts):
        want = 0
        while want < len(draft) and oracle.judgement(seeds[i], known[i] + want) < RATES[want]:
            want += 1
        assert out.num_tokens[i] == want + 1
        request = oracle.admission(i, [1], 1, SamplingParams(temperature=temperature), seeds[i])
        last = oracle.sample(row.numpy(), request, [1] * (known[i] + want))
        assert out.tokens[i, : want + 1].tolist() == [*draft[:want], last]
        tried[: min(want + 1, len(draft))] += 1
        stood[:want] += 1
    share = stood[:2] / tried[:2]
    assert np.all(np.abs(share - RATES[:2]) < 4 * np.sqrt(0.25 / tried[:2]))
    assert stood[2] == 0 and tried[2] > 500 and tried[3] == 0


def test_a_draft_that_is_right_does_not_stand_for_that():
    out, row = judge([[int(row_max())]] * 50, list(range(50)), [3] * 50, [0.0], temperature=0.0)
    assert out.num_tokens.tolist() == [1] * 50
    assert out.tokens[:, 0].tolist() == [int(row.argmax())] * 50


def row_max() -> int:
    """What the model says in all rows of `judge`."""
    return int(np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32).argmax())


def test_log_probabilities_are_the_model_s_of_the_tokens_that_came():
    drafts = [[5, 6], [7, 8]]
    out, row = judge(drafts, [1, 2], [4, 9], [1.0, 1.0], temperature=0.0, logprobs=0)
    assert out.num_tokens.tolist() == [3, 3] and out.logprobs is not None and out.row_start is not None
    entries = out.logprobs.unpack(out.logprobs.data.numpy())
    reference = row.double().log_softmax(-1)
    for i, draft in enumerate(drafts):
        for entry, token in zip(entries[out.row_start[i] :], [*draft, row_max()], strict=False):
            assert entry is not None and entry.ids[0] == token
            assert entry.values[0] == pytest.approx(float(reference[token]), abs=1e-5)


def test_verdicts_and_draws_are_independent():
    """Given what was drawn at a position, its draft stands no more often and no less."""
    n = 20000
    seeds = list(range(n))
    by_noise = [oracle.uniform(3, *oracle.keys(seed, 7)) < 0.5 for seed in seeds]
    stood = [oracle.judgement(seed, 7) < 0.5 for seed in seeds]
    both = np.mean(np.array(by_noise) & np.array(stood))
    assert abs(both - 0.25) < 4 * np.sqrt(0.25 * 0.75 / n)
