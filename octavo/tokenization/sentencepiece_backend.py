"""`tokenizers` objects that tokenize as SentencePiece does: BPE by scores, and unigram.

The same for a SentencePiece file and for a GGUF's copy of one. What differs from the library: text that
spells a control or user-defined token by name becomes that token, as in Transformers and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from octavo.errors import ModelError
from octavo.tokenization.charsmap import check_charsmap
from octavo.tokenization.merges import check_token_lengths, ranked_merges
from octavo.tokenization.parts import mark_added
from octavo.tokenization.sentencepiece_model import TokenType

SPACE = "▁"
# Below every path over single characters, and no further, so that sums of scores keep their precision.
_NEVER = -1e4


@dataclass
class Pieces:
    """A SentencePiece vocabulary and its rules, wherever it was read.

    Attributes:
        where: the file, for errors.
        tokens, scores, types: by id; `types` are `TokenType`.
        unk_id: None where characters without a piece vanish or become bytes.
        byte_fallback: characters without a piece become `<0x..>` pieces.
        charsmap: compiled character normalization; empty for none.
        prefix: a space before the text; it stands before every piece between added tokens if
            `prefix_everywhere`, else the caller puts it there (`TokenizerParts.leading_space`).
        trim: spaces at both ends go, runs become one.
        escape: spaces become ▁.
    """

    where: object
    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unk_id: int | None
    byte_fallback: bool
    charsmap: bytes = b""
    prefix: bool = True
    prefix_everywhere: bool = True
    trim: bool = False
    escape: bool = True

    def corrupt(self, what: str) -> ModelError:
        """The error for a vocabulary that cannot be used."""
        return ModelError(
            f"{self.where}: corrupt tokenizer ({what}): fetch it again or name another one with --tokenizer"
        )

    def of_type(self, *types: TokenType) -> list[str]:
        """Tokens of some types, in the order of their ids."""
        return [self.tokens[i] for i in np.flatnonzero(np.isin(np.asarray(self.types), types)).tolist()]


def bpe_backend(pieces: Pieces) -> Backend:
    """Llama 2's kind: the adjacent pair that forms the token of the highest score is merged first.

    Only normal and user-defined tokens take part, as in SentencePiece: a text that spells a byte or
    control token's name does not become that token.

    Raises:
        ModelError: a vocabulary that cannot be used.
    """
    _check(pieces)
    usable = np.isin(
        np.asarray(pieces.types), (TokenType.UNDEFINED, TokenType.NORMAL, TokenType.USER_DEFINED)
    )
    ids = np.flatnonzero(usable).tolist()
    parts = {pieces.tokens[i] for i in ids}
    merges = ranked_merges(((-pieces.scores[i], pieces.tokens[i]) for i in ids), parts)
    unknown = None if pieces.unk_id is None else pieces.tokens[pieces.unk_id]
    vocabulary = {token: i for i, token in enumerate(pieces.tokens)}
    backend = Backend(
        build(
            pieces,
            BPE,
            vocab=vocabulary,
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=pieces.byte_fallback,
        )
    )
    return finish(backend, pieces)


def unigram_backend(pieces: Pieces) -> Backend:
    """T5's kind: the tokens whose scores (log-probabilities) sum highest.

    Raises:
        ModelError: a vocabulary that cannot be used.
    """
    _check(pieces)
    types = np.asarray(pieces.types)
    scores = np.array(pieces.scores, dtype=np.float64)
    best = scores[types == TokenType.NORMAL].max(initial=-np.inf)
    best = best if np.isfinite(best) else 0.0
    lengths = np.array([len(token.encode()) for token in pieces.tokens], dtype=np.float64)
    defined = types == TokenType.USER_DEFINED
    scores[defined] = lengths[defined] * best - 0.1  # always chosen, as in SentencePiece
    scores[types == TokenType.UNUSED] = _NEVER
    vocabulary = list(zip(pieces.tokens, scores.tolist(), strict=True))
    backend = Backend(
        build(pieces, Unigram, vocab=vocabulary, unk_id=pieces.unk_id, byte_fallback=pieces.byte_fallback)
    )
    if pieces.byte_fallback:
        # The library would find a byte's token where a text spells its name.
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<(?=0x[0-9A-F]{2}>)"), "isolated")
    return finish(backend, pieces)


def _check(pieces: Pieces) -> None:
    check_token_lengths(pieces.tokens, pieces.where)
    if len(pieces.scores) != len(pieces.tokens):
        raise pieces.corrupt("its scores are missing")
    if not np.isfinite(np.asarray(pieces.scores, dtype=np.float64)).all():
        raise pieces.corrupt("a score is not finite")
    if len(set(pieces.tokens)) != len(pieces.tokens):
        raise pieces.corrupt("a token occurs twice in its vocabulary")


def build(pieces: Pieces, kind: Any, **arguments: Any) -> Any:
    """A model of the `tokenizers` library; its complaints become ours."""
    try:
        return kind(**arguments)
    except Exception as error:  # the library raises plain Exception
        raise pieces.corrupt(str(error)) from None


def finish(backend: Backend, pieces: Pieces) -> Backend:
    """Give a backend with a model the normalization, decoding and added tokens of its vocabulary.

    Raises:
        ModelError: a character map that cannot be used.
    """
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        check_charsmap(pieces.charsmap, pieces.where)
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.trim:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    space = SPACE if pieces.escape else " "
    if pieces.prefix and pieces.prefix_everywhere:
        steps.append(normalizers.Prepend(space))
    if pieces.escape:
        steps.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    decode: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")] if pieces.escape else []
    if pieces.byte_fallback:
        decode.append(decoders.ByteFallback())
    decode.append(decoders.Fuse())
    if pieces.prefix:
        decode.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decode)
    mark_added(
        backend,
        pieces.of_type(TokenType.CONTROL, TokenType.UNKNOWN),
        pieces.of_type(TokenType.USER_DEFINED),
    )
    return backend
