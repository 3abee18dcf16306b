"""Sampling on a GPU: the CPU's tokens, and no waiting for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplingState
from octavo.sampling.verifier import Verifier
from octavo.sampling_params import SamplingParams
from tests.sampling import oracle
from tests.sampling.test_sampler import BAD, EOS, variants

pytestmark = pytest.mark.gpu

VOCAB, MAX_LEN = 3001, 64


def setting(params: list[dict], device: str):
    """A state with one slot per setting, and its token table, alike on every device."""
    rng = np.random.default_rng(0)
    state = SamplingState(len(params), VOCAB, MAX_LEN, device)
    table = rng.integers(0, 20, (len(params), MAX_LEN)).astype(np.int32)
    for slot, p in enumerate(params):
        request = oracle.admission(slot, [1], 3, SamplingParams(max_tokens=None, **p), slot, EOS, BAD)
        state.add(request)
    return state, torch.from_numpy(table).to(device)


def inputs(rows: int, device: str):
    slots = np.arange(rows, dtype=np.int32)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    known = torch.arange(rows, dtype=torch.int32) % 30 + 4
    return logits.to(device), slots, torch.from_numpy(slots).to(device), known.to(device), known.numpy()


@pytest.mark.parametrize("bounds", [True, False])
def test_tokens_and_logprobs_equal_those_of_the_cpu(bounds):
    params = [{**p, "logprobs": 4 if i % 3 == 0 else None} for i, p in enumerate(variants() * 8)]
    answers = []
    for device in ("cpu", "cuda"):
        state, table = setting(params, device)
        logits, slots, slots_device, known, most = inputs(len(params), device)
        out = Sampler(state)(logits, slots, slots_device, known, table, most if bounds else None)
        answers.append((out.tokens.tolist(), out.logprobs.unpack(out.logprobs.data.cpu().numpy())))
    assert answers[0][0] == answers[1][0]
    for a, b in zip(answers[0][1], answers[1][1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.ids, a.rank) == (b.ids, b.rank)
            np.testing.assert_allclose(a.values, b.values, atol=1e-4)


@pytest.mark.parametrize("params", [[p] * 4 for p in variants()] + [variants()], ids=lambda p: str(p[0])[:60])
def test_the_host_never_waits(params):
    state, table = setting([{**p, "logprobs": 2} for p in params], "cuda")
    logits, slots, slots_device, known, most = inputs(len(params), "cuda")
    verifier = Verifier(Sampler(state))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plain = verifier(logits, slots, slots_device, known, table, most)
        drafts = np.full(len(slots), 1)
        drafted = verifier(
            logits.repeat_interleave(2, 0, output_size=2 * len(slots)),
            slots,
            slots_device,
            known,
            table,
            most,
            num_drafts=drafts,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(plain.tokens, drafted.tokens[:, 0])
