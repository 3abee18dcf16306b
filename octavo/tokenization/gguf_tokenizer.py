"""A `tokenizers` object from a GGUF's metadata: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile, reads_metadata
from octavo.tokenization.pre_tokenizers import find_pre_tokenizer
from octavo.tokenization.tokenizer import TokenizerParts, set_bos_eos

logger = logging.getLogger(__name__)

SPACE = "▁"
# A GGUF has no generation_config.json: ends of a turn are also found by name, as llama.cpp finds them.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Vocabulary:
    """The `tokenizer.ggml.*` part of the metadata, checked."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.model = self.get("model", "")
        self.tokens: list[str] = self.get("tokens", [])
        if not self.model or not isinstance(self.tokens, list) or not self.tokens:
            raise ModelError(f"{file.path} holds no tokenizer: name one with --tokenizer")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self.corrupt("a token occurs twice in its vocabulary")
        types = self.get("token_type")
        if types is None:
            types = np.full(len(self.tokens), TokenType.NORMAL)
        if len(types) != len(self.tokens):
            raise self.corrupt(f"{len(self.tokens)} tokens have {len(types)} types")
        self.types: np.ndarray = np.asarray(types)

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self.file.path}: corrupt tokenizer ({what}): fetch it again or name another one")

    def of_type(self, *types: TokenType) -> list[str]:
        return [self.tokens[i] for i in np.flatnonzero(np.isin(self.types, types))]

    def special(self, name: str) -> str | None:
        token_id = self.get(_SPECIAL_KEYS[name])
        if token_id is None or not 0 <= token_id < len(self.tokens):
            return None
        return self.tokens[token_id]


@reads_metadata
def read_gguf_tokenizer(path: str | Path) -> TokenizerParts:
    """The tokenizer inside a GGUF file.

    Control tokens are special (dropped by `skip_special_tokens`), user-defined ones are found in
    text but are ordinary otherwise; BOS and EOS are added as the file's flags say, else as
    llama.cpp does for that vocabulary.

    Raises:
        ModelError: no tokenizer in the file, a kind that is not supported, or a corrupt one.
    """
    file = GGUFFile(path)
    vocabulary = _Vocabulary(file)
    special = {name: text for name in _SPECIAL_KEYS if (text := vocabulary.special(name)) is not None}
    if vocabulary.model == "gpt2":
        backend, add_bos = _byte_level_bpe(vocabulary)
    elif vocabulary.model == "llama":
        backend, add_bos = _sentencepiece_bpe(vocabulary), True
    else:
        raise ModelError(
            f"{path} holds a tokenizer of the kind {vocabulary.model!r}, not gpt2 or llama: "
            "name the model's original tokenizer folder with --tokenizer"
        )
    control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    defined = vocabulary.of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in defined])
    add_bos = bool(vocabulary.get("add_bos_token", add_bos))
    add_eos = bool(vocabulary.get("add_eos_token", False))
    set_bos_eos(
        backend,
        _needed(vocabulary, special, "bos_token") if add_bos else None,
        _needed(vocabulary, special, "eos_token") if add_eos else None,
    )
    return TokenizerParts(backend, special, _templates(file), _turn_ends(vocabulary, set(control)))


def _needed(vocabulary: _Vocabulary, special: dict[str, str], name: str) -> str:
    if name not in special:
        raise vocabulary.corrupt(f"it asks for a {name} but names none")
    return special[name]


def _turn_ends(vocabulary: _Vocabulary, control: set[str]) -> tuple[str, ...]:
    ids = (vocabulary.get("eot_token_id"), vocabulary.get("eom_token_id"))
    declared = [vocabulary.tokens[i] for i in ids if i is not None and 0 <= i < len(vocabulary.tokens)]
    return tuple(declared + [t for t in TURN_ENDS if t in control])


def _templates(file: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in file.metadata.items():
        if key == prefix:
            templates["default"] = value
        elif key.startswith(prefix + "."):
            templates[key.removeprefix(prefix + ".")] = value
    return templates


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocabulary.ids, merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise vocabulary.corrupt(str(error)) from None


def _byte_level_bpe(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """GPT-2's kind: bytes spelled as characters, words cut by expressions, ranked merges."""
    name = vocabulary.get("pre")
    if name is None:
        logger.warning(
            "%s names no pre-tokenizer (an old file): llama.cpp's default is used, "
            "which may not be the model's; name the original tokenizer with --tokenizer",
            vocabulary.file.path,
        )
        name = "default"
    pre = find_pre_tokenizer(name)
    # A merge is "left right"; the left part may itself begin with a space in odd vocabularies.
    lines: list[str] = vocabulary.get("merges", [])
    cuts = [line.find(" ", 1) for line in lines]
    if not lines or min(cuts) < 0:
        raise vocabulary.corrupt("its merges are missing or malformed")
    merges = [(line[:cut], line[cut + 1 :]) for line, cut in zip(lines, cuts, strict=True)]
    backend = Backend(_bpe(vocabulary, merges, ignore_merges=pre.ignore_merges))
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Backend:
    """Llama 2's kind: the adjacent pair that forms the token of the highest score is merged first;
    characters without a token become byte tokens."""
    unknown = vocabulary.special("unk_token")
    backend = Backend(
        _bpe(vocabulary, _score_merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(vocabulary.get("add_space_prefix", True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _score_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Merges in the order in which scores would choose them.

    Only normal and user-defined tokens take part, as in SentencePiece: a text that spells a byte or
    control token's name does not become that token.
    """
    scores = vocabulary.get("scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise vocabulary.corrupt("its scores are missing")
    mergeable = np.isin(vocabulary.types, (TokenType.UNDEFINED, TokenType.NORMAL, TokenType.USER_DEFINED))
    pieces = {vocabulary.tokens[i] for i in np.flatnonzero(mergeable)}
    merges = []
    for token_id in np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable").tolist():
        if not mergeable[token_id]:
            continue
        token = vocabulary.tokens[token_id]
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        found = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
        merges.extend(sorted(found, key=lambda pair: (vocabulary.ids[pair[0]], vocabulary.ids[pair[1]])))
    return merges
