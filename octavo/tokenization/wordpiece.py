"""BERT's WordPiece: from a vocab.txt and the settings beside it, or from a GGUF's copy of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from octavo.errors import ModelError
from octavo.tokenization.parts import mark_added, set_bos_eos

FILE_NAME = "vocab.txt"
NAMED = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
CONTINUES = "##"
MAX_FILE_BYTES = 64 << 20


def read_vocabulary(file: Path) -> list[str]:
    """The tokens of a vocab.txt, one a line, by id.

    Raises:
        ModelError: unreadable, too large, not UTF-8, or with a token twice.
    """
    try:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelError(
                f"{file} has {size} bytes, more than any vocabulary ({MAX_FILE_BYTES}): fetch it again"
            )
        tokens = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read ({error}): fetch it again") from None
    tokens = [token.removesuffix("\r") for token in tokens]
    while tokens and not tokens[-1]:
        tokens.pop()
    if len(set(tokens)) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise ModelError(f"{file}: the token {twice[:40]!r} occurs twice: fetch it again")
    return tokens


def wordpiece_backend(
    where: object, tokens: Sequence[str], special: Mapping[str, str], settings: Mapping[str, Any]
) -> Backend:
    """A WordPiece tokenizer that writes CLS before and SEP after a text.

    Args:
        where: the file, for errors.
        tokens: by id; continuations begin with `##`.
        special: `unk_token`, `cls_token`, `sep_token`, … to their texts.
        settings: `do_lower_case` (true), `strip_accents` (as `do_lower_case`), `tokenize_chinese_chars`
            (true) of tokenizer_config.json.

    Raises:
        ModelError: a special token that the vocabulary lacks, or settings of the wrong kind.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for name in ("unk_token", "cls_token", "sep_token"):
        if special.get(name) not in vocabulary:
            raise ModelError(
                f"{where}: the {name} {special.get(name)!r} is not in its vocabulary: correct its files"
            )
    backend = Backend(WordPiece(vocabulary, unk_token=special["unk_token"], max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUES, cleanup=True)
    mark_added(backend, [text for text in special.values() if text in vocabulary])
    set_bos_eos(backend, special["cls_token"], special["sep_token"])
    return backend
