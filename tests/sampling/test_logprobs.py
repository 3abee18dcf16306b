"""Log-probabilities of the raw distribution, packed, sliced and unpacked."""

import numpy as np
import pytest
import torch

from octavo.sampling import logprobs as module
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplingState
from octavo.sampling_params import SamplingParams
from octavo.step_messages import TokenLogprobs
from tests.sampling.oracle import admission

VOCAB = 200


def expected(row: np.ndarray, token: int, k: int) -> tuple[list[int], np.ndarray, int]:
    x = row.astype(np.float64)
    values = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.argsort(-values, kind="stable")[: VOCAB if k == -1 else k]
    ids = [token, *order.tolist()]
    return ids, values[ids], 1 + int((values > values[token]).sum())


def check(entry: TokenLogprobs | None, row: np.ndarray, token: int, k: int) -> None:
    ids, values, rank = expected(row, token, k)
    assert entry is not None
    assert entry.ids == ids
    np.testing.assert_allclose(entry.values, values, atol=2e-6)
    assert entry.rank == rank


def sample(counts: list[int | None], logits: torch.Tensor, **params):
    rows = len(counts)
    state = SamplingState(rows, VOCAB, 8, "cpu")
    for slot, k in enumerate(counts):
        state.add(admission(slot, [1, 2], 1, SamplingParams(logprobs=k, **params), seed=slot))
    slots = np.arange(rows, dtype=np.int32)
    table = torch.ones(rows, 8, dtype=torch.int32)
    known = torch.full((rows,), 2)
    return Sampler(state)(logits, slots, torch.from_numpy(slots), known, table)


@pytest.mark.parametrize(
    "params",
    [dict(temperature=0), dict(), dict(temperature=0.5, top_k=3, repetition_penalty=2.0, logit_bias={4: 50})],
    ids=str,
)
def test_each_row_reports_what_it_asked_for(params):
    counts = [5, None, 0, -1, 1, 100, None, 20]
    logits = torch.randn(len(counts), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    out = sample(counts, logits, **params)
    assert out.logprobs is not None
    assert out.logprobs.data.dtype == torch.int32 and out.logprobs.data.dim() == 1
    entries = out.logprobs.unpack(out.logprobs.data.numpy())
    for row, k in enumerate(counts):
        if k is None:
            assert entries[row] is None
        else:
            check(entries[row], logits[row].numpy(), int(out.tokens[row]), k)


def test_nobody_asks():
    assert sample([None, None], torch.zeros(2, VOCAB)).logprobs is None


def test_rank_counts_strictly_likelier_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    out = prompt_logprobs(lambda lo, hi: logits[lo:hi], torch.tensor([9]), np.array([0]), VOCAB)
    assert out.unpack(out.data.numpy())[0].rank == 2


def test_prompt_logprobs_never_hold_more_than_a_slice(monkeypatch):
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 10 * VOCAB)
    rows = 137
    gen = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(rows, 8, generator=gen), torch.randn(8, VOCAB, generator=gen)
    targets = torch.randint(0, VOCAB, (rows,), generator=gen)
    counts = np.array([3] * 60 + [-1] * 17 + [0] * 60)
    seen = []

    def head_of(lo: int, hi: int) -> torch.Tensor:
        seen.append(hi - lo)
        return hidden[lo:hi] @ head

    out = prompt_logprobs(head_of, targets, counts, VOCAB)
    assert max(seen) <= 10 and sum(seen) == rows
    entries = out.unpack(out.data.numpy())
    logits = (hidden @ head).numpy()
    for row in range(rows):
        check(entries[row], logits[row], int(targets[row]), int(counts[row]))


def test_bfloat16_logits_are_normalised_in_float32():
    logits = (torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 4).bfloat16()
    out = sample([2, 2, 2], logits, temperature=0)
    for row, entry in enumerate(out.logprobs.unpack(out.logprobs.data.numpy())):
        check(entry, logits[row].float().numpy(), int(out.tokens[row]), 2)
