"""Prompt look-up against its definition, and the time that it may take."""

import time

import numpy as np
import pytest

from octavo.speculative.ngram import NgramProposer


def longest_match(tokens: list[int], shortest: int, longest: int) -> int:
    """Tokens of the longest ending that occurs before, 0 if none does, by trying all."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        ending = tokens[-length:]
        if any(tokens[i : i + length] == ending for i in range(len(tokens) - length)):
            return length
    return 0


@pytest.mark.parametrize("bounds", [(1, 1), (1, 3), (2, 5), (3, 3)])
def test_drafts_follow_the_longest_match(bounds: tuple[int, int]):
    rng = np.random.default_rng(0)
    proposer = NgramProposer(*bounds)
    found = 0
    for _ in range(2000):
        tokens = rng.integers(0, rng.integers(1, 6), rng.integers(1, 30)).tolist()
        most = int(rng.integers(1, 8))
        proposal = proposer.propose(0, np.array(tokens, np.int32), most)
        length = longest_match(tokens, *bounds)
        draft = proposal.tokens.tolist()
        assert bool(draft) == bool(length)
        if not length:
            continue
        found += 1
        assert proposal.kind == length - bounds[0] < proposer.num_kinds
        ending, places = tokens[-length:], range(len(tokens) - length)
        ends = [i + length for i in places if tokens[i : i + length] == ending]
        whole = [e for e in ends if e + most <= len(tokens)]
        # The newest of which the whole draft is known, else the one with most behind it.
        assert draft == tokens[(end := whole[-1] if whole else ends[0]) : end + most]
    assert found > 300


def test_nothing_in_a_text_without_repeats():
    proposer = NgramProposer(2, 5)
    assert not len(proposer.propose(0, np.arange(100, dtype=np.int32), 5).tokens)
    assert not len(proposer.propose(0, np.array([1], np.int32), 5).tokens)


def test_time_within_fifty_microseconds():
    tokens = np.random.default_rng(0).integers(0, 32000, 8192).astype(np.int32)
    tokens[-5:] = tokens[100:105]
    proposer = NgramProposer(2, 5)
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        assert len(proposer.propose(0, tokens, 8).tokens) == 8
        times.append(time.perf_counter() - begin)
    assert min(times) < 50e-6
