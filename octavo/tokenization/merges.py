"""Ranked merges for vocabularies that only say how good each token is (SentencePiece BPE, tiktoken, tekken).

Both take, again and again, the adjacent pair whose joined token is best, the leftmost of equals. The
`tokenizers` library wants pairs in order instead: every way to make a token of two others gets the
token's rank. Of equals, the pair with the longer left part comes first; that is the leftmost wherever
the runs that make them equal (spaces, line ends) grow from the left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from octavo.errors import ModelError

MAX_TOKEN_CHARS = 2048
"""Longer tokens exist in no model (the longest are runs of some hundred blanks), and cost the square."""
_BLOCK_CHARS = 1 << 20
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse


def check_token_lengths(tokens: Iterable[str], where: object) -> None:
    """Refuse a vocabulary with absurdly long tokens.

    Raises:
        ModelError: a token of more than `MAX_TOKEN_CHARS` characters.
    """
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ModelError(
            f"{where}: corrupt tokenizer (a token of {longest} characters, at most {MAX_TOKEN_CHARS} are "
            "read): fetch it again or name another one with --tokenizer"
        )


def ranked_merges(ranked: Iterable[tuple[float, str]], parts: Collection[str]) -> list[tuple[str, str]]:
    """Merges, best first.

    A vocabulary of 262,144 has two million ways to cut a token; they are found by hashes, in arrays.

    Args:
        ranked: (rank, token), a lower rank being better; tokens that merges may make.
        parts: the tokens that merges may join.
    """
    known = np.sort(np.concatenate([_hashes(block)[0] for _, block in _blocks((0.0, t) for t in parts)]))
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    pairs: list[tuple[str, str]] = []
    for ranks, block in _blocks(ranked):
        _, between = _hashes(block)
        owner, cut, left, right = between
        hit = np.flatnonzero(_is_in(left, known) & _is_in(right, known))
        owner, cut = owner[hit], cut[hit]
        lengths = np.fromiter(map(len, block), dtype=np.int64, count=len(block))[owner]
        found.append((np.asarray(ranks, dtype=np.float64)[owner], -cut, cut - lengths))
        pairs += [(block[i][:at], block[i][at:]) for i, at in zip(owner.tolist(), cut.tolist(), strict=True)]
    if not found:
        return []
    rank, left_key, right_key = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    order = np.lexsort((right_key, left_key, rank)).tolist()
    # Hashes find candidates; whether they are tokens is asked here.
    return [pair for i in order if (pair := pairs[i])[0] in parts and pair[1] in parts]


def _blocks(ranked: Iterable[tuple[float, str]]) -> Iterator[tuple[list[float], list[str]]]:
    """Ranks and tokens in blocks of bounded size; empty tokens are left out."""
    ranks: list[float] = []
    tokens: list[str] = []
    size = 0
    for rank, token in ranked:
        if token:
            ranks.append(rank)
            tokens.append(token)
            size += len(token)
        if size >= _BLOCK_CHARS:
            yield ranks, tokens
            ranks, tokens, size = [], [], 0
    yield ranks, tokens


def _hashes(tokens: list[str]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Hashes of tokens, uint64 `[tokens]`; for every cut inside one (token, characters before it, hashes
    of the left and the right part).

    A text's hash is the polynomial of its characters, modulo 2**64; sums of the joined tokens' terms give
    the hash of any part of them.
    """
    codes = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum((codes + np.uint64(1)) * _powers(_BASE, len(codes)), out=sums[1:])
    inverse = _powers(pow(_BASE, -1, 1 << 64), len(codes) + 1)
    whole = (sums[ends] - sums[starts]) * inverse[starts]
    owner = np.repeat(np.arange(len(tokens)), np.maximum(lengths - 1, 0))
    at = np.arange(len(codes))
    at = np.delete(at, starts)
    left = (sums[at] - sums[starts[owner]]) * inverse[starts[owner]]
    right = (sums[ends[owner]] - sums[at]) * inverse[at]
    return whole, (owner, at - starts[owner], left, right)


def _powers(base: int, count: int) -> np.ndarray:
    """base**0, base**1, … modulo 2**64, uint64 `[count]`."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


def _is_in(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    if not len(known):
        return np.zeros(len(values), dtype=bool)
    at = np.searchsorted(known, values)
    return known[np.minimum(at, len(known) - 1)] == values
