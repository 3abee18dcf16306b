"""Drafts change nothing: the same tokens at any draft length, whoever proposes them."""

import numpy as np
import pytest
import torch

from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplingState
from octavo.sampling.verifier import Verifier
from octavo.sampling_params import SamplingParams
from tests.sampling import oracle

VOCAB, LENGTH = 40, 64
REQUESTS = [
    dict(temperature=0),
    dict(temperature=0.8),
    dict(temperature=0, frequency_penalty=1.2, presence_penalty=0.3),
    dict(temperature=0.7, frequency_penalty=-2.0),
    dict(temperature=1.0, repetition_penalty=1.3, top_p=0.9, min_tokens=30, stop_token_ids=[4, 5]),
    dict(temperature=0.9, top_k=8, logit_bias={6: 2.0}, logprobs=3),
]
BAD = ((3,), (1, 2), (9, 8, 7), (6, 6))


def toy_logits(tokens: list[int]) -> np.ndarray:
    """A 'model': a fixed function of the last two tokens."""
    return np.random.default_rng((tokens[-1], tokens[-2])).normal(0, 2, VOCAB).astype(np.float32)


class FakeProposer:
    """Knows the answer, and errs at random."""

    def __init__(self, answers: list[list[int]], accuracy: float):
        self.answers, self.accuracy = answers, accuracy
        self.rng = np.random.default_rng(0)

    def draft(self, request: int, known: int, count: int) -> list[int]:
        right = self.answers[request][known : known + count]
        return [t if self.rng.random() < self.accuracy else int(self.rng.integers(VOCAB)) for t in right]


def generate(most: int, proposer: FakeProposer | None) -> tuple[list[list[int]], list[list], list[int]]:
    """All requests up to `LENGTH` tokens with up to `most` drafts each: tokens, logprobs, accepted drafts."""
    n = len(REQUESTS)
    state = SamplingState(n, VOCAB, LENGTH + 8, "cpu")
    table = torch.full((n, LENGTH + 8), -1, dtype=torch.int32)
    tokens = [[i + 1, 2 * i + 1, 6] for i in range(n)]
    for slot, params in enumerate(REQUESTS):
        state.add(
            oracle.admission(
                slot, tokens[slot], 3, SamplingParams(max_tokens=None, **params), slot + 5, (2,), BAD
            )
        )
        table[slot, :3] = torch.tensor(tokens[slot], dtype=torch.int32)
    verifier = Verifier(Sampler(state))
    logprobs: list[list] = [[] for _ in range(n)]
    accepted = [0] * n
    while live := [i for i in range(n) if len(tokens[i]) < LENGTH]:
        rows, counts = [], []
        for i in live:
            drafts = proposer.draft(i, len(tokens[i]), most) if proposer else []
            known = len(tokens[i])
            table[i, known : known + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            rows += [toy_logits(tokens[i] + drafts[:j]) for j in range(len(drafts) + 1)]
            counts.append(len(drafts))
        slots = np.array(live, np.int32)
        known = torch.tensor([len(tokens[i]) for i in live], dtype=torch.int32)
        out = verifier(
            torch.from_numpy(np.stack(rows)),
            slots,
            torch.from_numpy(slots),
            known,
            table,
            max_known=known.numpy(),
            num_drafts=np.array(counts) if proposer else None,
        )
        entries = out.logprobs.unpack(out.logprobs.data.numpy()) if out.logprobs else None
        chosen = out.tokens.reshape(len(live), -1)
        assert chosen.shape == (len(live), max(counts) + 1)
        for row, i in enumerate(live):
            count = 1 if out.num_tokens is None else int(out.num_tokens[row])
            assert 1 <= count <= counts[row] + 1
            accepted[i] += count - 1
            for j in range(count):
                if len(tokens[i]) == LENGTH:
                    break
                table[i, len(tokens[i])] = chosen[row, j]
                tokens[i].append(int(chosen[row, j]))
                if entries:
                    logprobs[i].append(entries[row + j if out.row_start is None else out.row_start[row] + j])
    return tokens, logprobs, accepted


@pytest.fixture(scope="module")
def plain():
    return generate(0, None)


def test_plain_decoding_matches_the_oracle(plain):
    for i, params in enumerate(REQUESTS):
        answer = plain[0][i]
        request = oracle.admission(
            i, answer[:3], 3, SamplingParams(max_tokens=None, **params), i + 5, (2,), BAD
        )
        for known in range(3, LENGTH):
            assert answer[known] == oracle.sample(toy_logits(answer[:known]), request, answer[:known])


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_output_is_the_same_at_any_draft_length(plain, most, accuracy):
    answers, logprobs, _ = plain
    tokens, speculated, accepted = generate(most, FakeProposer(answers, accuracy))
    assert tokens == answers
    assert [e.ids[0] for e in speculated[-1]] == answers[-1][3:]
    assert speculated[-1] == logprobs[-1]
    if accuracy == 1.0:
        steps = -(-(LENGTH - 3) // (most + 1))
        assert all(count >= LENGTH - 3 - steps for count in accepted)
    elif accuracy == 0.7:
        assert all(0 < count < LENGTH for count in accepted)


def test_no_drafts_cost_nothing(plain):
    """The sampler's own tensor is handed on, no row is built."""
    state = SamplingState(2, VOCAB, 8, "cpu")
    for slot in range(2):
        state.add(oracle.admission(slot, [1], 1, SamplingParams(temperature=0)))
    sampler = Sampler(state)
    verifier = Verifier(sampler)
    slots = np.arange(2, dtype=np.int32)
    args = (
        torch.randn(2, VOCAB),
        slots,
        torch.from_numpy(slots),
        torch.ones(2).int(),
        torch.ones(2, 8).int(),
    )
    for none in (None, np.zeros(2, np.int64)):
        out = verifier(*args, num_drafts=none)
        assert out.tokens.shape == (2,)
        assert out.tokens.tolist() == sampler(*args).tokens.tolist()
        assert out.num_tokens is None
