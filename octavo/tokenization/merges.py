"""Ranked merges for vocabularies that only say how good each token is (SentencePiece BPE, tiktoken, tekken).

Both take, again and again, the adjacent pair whose joined token is best, the leftmost of equals. The
`tokenizers` library wants pairs in order instead: every way to make a token of two others gets the
token's rank. Of equals, the pair with the longer left part comes first; that is the leftmost wherever
the runs that make them equal (spaces, line ends) grow from the left.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from octavo.errors import ModelError

MAX_TOKEN_CHARS = 2048
"""Longer tokens exist in no model (the longest are runs of some hundred blanks), and cost the square."""


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


def ranked_merges(ranked: Iterable[tuple[float, str]], parts: Container[str]) -> list[tuple[str, str]]:
    """Merges, best first.

    Args:
        ranked: (rank, token), a lower rank being better; tokens that merges may make.
        parts: the tokens that merges may join.
    """
    found = []
    for rank, token in ranked:
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in parts:
                right = token[cut:]
                if right in parts:
                    found.append((rank, -cut, cut - len(token), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]
