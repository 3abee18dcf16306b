"""The batched sampler against one row at a time, and what may not matter to a row."""

import numpy as np
import pytest
import torch

from octavo.errors import RequestError
from octavo.sampling import processors
from octavo.sampling import sampler as sampler_module
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplingState
from octavo.sampling_params import SamplingParams
from tests.sampling import oracle

VOCAB, MAX_LEN = 97, 48
EOS = (2, 5)
BAD = ((11,), (7, 8), (7, 9, 10), (1, 2, 3, 4))


def variants() -> list[dict]:
    """Settings that a busy server may hold at once."""
    return [
        dict(temperature=0),
        dict(),
        dict(temperature=0.6),
        dict(temperature=0, repetition_penalty=1.7),
        dict(temperature=0, frequency_penalty=1.5, presence_penalty=-0.7),
        dict(frequency_penalty=-2.0, presence_penalty=2.0, repetition_penalty=0.6, temperature=1.3),
        dict(temperature=0, logit_bias={3: 100.0, 4: -100.0, 96: 1.0}),
        dict(allowed_token_ids=[1, 5, 9, 9], temperature=2.0),
        dict(temperature=0, allowed_token_ids=[2, 5, 60], min_tokens=40),
        dict(min_tokens=6, stop_token_ids=[60, 61], logit_bias={60: 50.0, 61: 50.0, 2: 60.0}),
        dict(top_k=5),
        dict(top_p=0.7, temperature=0.8),
        dict(min_p=0.2),
        dict(top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, temperature=1.5),
        dict(temperature=0, top_k=3, top_p=0.5),
    ]


class Batch:
    """Requests in slots, with random tokens known so far."""

    def __init__(self, params: list[dict], seed: int = 0, vocab: int = VOCAB, max_len: int = MAX_LEN):
        rng = np.random.default_rng(seed)
        slots = rng.permutation(len(params) + 3)[: len(params)]
        self.vocab = vocab
        self.state = SamplingState(len(params) + 3, vocab, max_len, "cpu")
        self.table = torch.from_numpy(rng.integers(0, vocab, (len(params) + 3, max_len)).astype(np.int32))
        self.slots = slots.astype(np.int32)
        self.requests, self.tokens = [], []
        for slot, p in zip(slots.tolist(), params, strict=True):
            prompt, output = int(rng.integers(1, 12)), int(rng.integers(0, max_len - 20))
            tokens = rng.integers(0, min(vocab, 12), prompt + output).tolist()
            request = oracle.admission(
                slot, tokens, prompt, SamplingParams(max_tokens=None, **p), int(rng.integers(2**62)), EOS, BAD
            )
            if rng.random() < 0.5:
                request.bad_words_ids = []
            self.table[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            self.state.add(request)
            self.requests.append(request)
            self.tokens.append(tokens)

    def sample(
        self, logits: torch.Tensor, order: list[int] | None = None, sampler: Sampler | None = None
    ) -> list[int]:
        order = list(range(len(self.requests))) if order is None else order
        slots = self.slots[order]
        known = torch.tensor([len(self.tokens[i]) for i in order], dtype=torch.int32)
        before = logits.clone()
        out = (sampler or Sampler(self.state))(
            logits[order], slots, torch.from_numpy(slots), known, self.table
        )
        assert torch.equal(before, logits)
        assert out.tokens.dtype == torch.int32
        return out.tokens.tolist()


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32))


@pytest.mark.parametrize("seed", range(8))
def test_every_setting_matches_the_oracle(seed):
    params = variants()
    batch = Batch(params, seed)
    logits = random_logits(len(params), seed)
    expected = [
        oracle.sample(logits[i].numpy(), request, batch.tokens[i]) for i, request in enumerate(batch.requests)
    ]
    assert batch.sample(logits) == expected


@pytest.mark.parametrize("params", variants(), ids=str)
def test_batches_of_one_setting_match_the_oracle(params):
    batch = Batch([params] * 6, 3)
    logits = random_logits(6, 4)
    expected = [oracle.sample(logits[i].numpy(), r, batch.tokens[i]) for i, r in enumerate(batch.requests)]
    assert batch.sample(logits) == expected


def test_a_row_does_not_depend_on_its_batch():
    params = variants() * 3
    batch = Batch(params, 1)
    logits = random_logits(len(params), 2)
    together = batch.sample(logits)
    shuffled = np.random.default_rng(5).permutation(len(params)).tolist()
    assert batch.sample(logits, shuffled) == [together[i] for i in shuffled]
    assert [batch.sample(logits, [i])[0] for i in range(len(params))] == together


def test_slices_do_not_change_the_result(monkeypatch):
    params = variants() * 4
    batch = Batch(params, 1)
    logits = random_logits(len(params), 2)
    whole = batch.sample(logits)
    monkeypatch.setattr(sampler_module, "SLICE_ELEMENTS", 3 * VOCAB)
    monkeypatch.setattr(processors, "_GATHER_ELEMENTS", 50)
    assert batch.sample(logits) == whole


def test_bfloat16_logits_are_sampled_as_their_float32_values():
    params = variants()
    batch = Batch(params, 6)
    logits = random_logits(len(params), 6).bfloat16()
    assert batch.sample(logits) == batch.sample(logits.float())


def test_a_reused_sampler_follows_changes_of_slots_and_tokens():
    """Cached indices and the count buffer carry nothing over."""
    batch = Batch(variants(), 2)
    sampler = Sampler(batch.state)
    rng = np.random.default_rng(0)
    for step in range(12):
        logits = random_logits(len(batch.requests), step)
        order = (
            list(range(len(batch.requests))) if step % 2 else rng.permutation(len(batch.requests)).tolist()
        )
        expected = [oracle.sample(logits[i].numpy(), batch.requests[i], batch.tokens[i]) for i in order]
        assert batch.sample(logits, order, sampler) == expected
        for i, token in zip(order, expected, strict=True):
            batch.table[batch.slots[i], len(batch.tokens[i])] = token
            batch.tokens[i].append(token)
        if step % 4 == 3:  # a new request takes a slot over
            request = batch.requests[0]
            request.params = SamplingParams(max_tokens=None, **variants()[step])
            batch.state.remove(request.slot)
            batch.state.add(request)


def test_repeated_slots_are_conditioned_on_their_own_position():
    """Rows of a verification: one slot, several lengths."""
    batch = Batch([dict(temperature=0.9, frequency_penalty=1.0, repetition_penalty=1.3, min_tokens=20)], 4)
    request, slot = batch.requests[0], int(batch.slots[0])
    tokens = batch.table[slot].tolist()
    lengths = list(range(request.prompt_len, request.prompt_len + 12))
    logits = random_logits(12, 9)
    slots = np.full(12, slot, np.int32)
    out = Sampler(batch.state)(logits, slots, torch.from_numpy(slots), torch.tensor(lengths), batch.table)
    expected = [oracle.sample(logits[i].numpy(), request, tokens[:n]) for i, n in enumerate(lengths)]
    assert out.tokens.tolist() == expected


def test_bad_words_look_at_the_output_only():
    params = SamplingParams(temperature=0)
    state = SamplingState(1, VOCAB, MAX_LEN, "cpu")
    state.add(oracle.admission(0, [7, 7], 1, params, bad=((7, 8), (7, 7, 9))))
    table = torch.zeros(1, MAX_LEN, dtype=torch.int32)
    table[0, :2] = 7
    logits = torch.zeros(2, VOCAB)
    logits[0, 8] = logits[1, 9] = 5.0
    slots = np.zeros(2, np.int32)
    out = Sampler(state)(logits, slots, torch.zeros(2, dtype=torch.int64), torch.tensor([2, 2]), table)
    # (7, 8) is completed by 8; (7, 7, 9) would need two 7 in the output, one is the prompt's.
    assert out.tokens.tolist() == [0, 9]


def test_large_extremes_give_valid_tokens():
    extremes = [
        dict(temperature=1e300),
        dict(temperature=1.1e-5),
        dict(repetition_penalty=1e300),
        dict(repetition_penalty=1e-300),
        dict(top_p=1e-300),
        dict(top_k=10**12),
        dict(min_tokens=10**6),
    ]
    batch = Batch(extremes, 0)
    logits = random_logits(len(extremes), 0)
    logits[:, 50:] = -float("inf")
    assert all(0 <= token < 50 for token in batch.sample(logits))


def test_everything_forbidden_still_gives_a_token_of_the_vocabulary():
    batch = Batch([dict(allowed_token_ids=[2], min_tokens=47, top_k=k) for k in (0, 3)], 0)
    assert all(0 <= token < VOCAB for token in batch.sample(random_logits(2, 0)))


def test_ids_outside_the_vocabulary_are_refused_and_eos_beyond_it_ignored():
    state = SamplingState(1, VOCAB, MAX_LEN, "cpu")
    for bad in (
        dict(stop_token_ids=[VOCAB], min_tokens=1),
        dict(allowed_token_ids=[VOCAB]),
        dict(logit_bias={VOCAB: 1}),
        dict(logprobs=VOCAB + 1),
    ):
        with pytest.raises(RequestError):
            state.add(oracle.admission(0, [1], 1, SamplingParams(**bad)))
    state.add(oracle.admission(0, [1], 1, SamplingParams(min_tokens=2, temperature=0), eos=(3, VOCAB + 10)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 9.0
    table = torch.ones(1, MAX_LEN, dtype=torch.int32)
    slots = np.zeros(1, np.int32)
    assert Sampler(state)(logits, slots, torch.zeros(1).long(), torch.tensor([2]), table).tokens.item() == 0
    assert Sampler(state)(logits, slots, torch.zeros(1).long(), torch.tensor([3]), table).tokens.item() == 3


def test_wrong_width_and_empty_batch():
    state = SamplingState(1, VOCAB, MAX_LEN, "cpu")
    empty = np.zeros(0, np.int32)
    table = torch.zeros(1, MAX_LEN, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int64)
    assert Sampler(state)(torch.zeros(0, VOCAB), empty, none, none, table).tokens.shape == (0,)
    with pytest.raises(ValueError, match="98 columns"):
        Sampler(state)(torch.zeros(1, 98), np.zeros(1, np.int32), none, none, table)


@pytest.mark.parametrize(
    "params",
    [
        dict(),
        dict(temperature=0.5),
        dict(top_k=4),
        dict(top_p=0.8),
        dict(min_p=0.15, temperature=1.4),
        dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5, top_k=10),
    ],
    ids=str,
)
def test_tokens_follow_the_distribution(params):
    """Chi-square of 8000 seeds against softmax of what the oracle leaves."""
    draws, vocab = 8_000, 16
    tokens = [1, 2, 3, 3, 5, 3]
    p = SamplingParams(**params)
    state = SamplingState(draws, vocab, 8, "cpu")
    for slot in range(draws):
        state.add(oracle.admission(slot, tokens, 2, p, seed=slot))
    logits = np.random.default_rng(1).normal(0, 1.5, vocab).astype(np.float32)
    slots = np.arange(draws, dtype=np.int32)
    table = torch.tensor([tokens + [0, 0]], dtype=torch.int32).repeat(draws, 1)
    rows = torch.from_numpy(np.tile(logits, (draws, 1)))
    out = Sampler(state)(rows, slots, torch.from_numpy(slots), torch.full((draws,), len(tokens)), table)
    x = oracle.processed(logits, oracle.admission(0, tokens, 2, p), tokens) / p.temperature
    keep = oracle.kept(x, p)
    weights = np.where(keep, np.exp(x - x.max()), 0)
    expected = draws * weights / weights.sum()
    counts = np.bincount(out.tokens.numpy(), minlength=vocab)
    assert not counts[~keep].any()
    freedom = keep.sum() - 1
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_plans_are_kept_while_slots_stay():
    batch = Batch(variants(), 0)
    sampler = Sampler(batch.state)
    logits = random_logits(len(batch.requests), 0)
    batch.sample(logits, sampler=sampler)
    plan = next(iter(sampler._plans.values()))
    batch.sample(logits, sampler=sampler)
    assert next(iter(sampler._plans.values())) is plan
    batch.state.add(batch.requests[0])
    batch.sample(logits, sampler=sampler)
    assert next(iter(sampler._plans.values())) is not plan
