"""A `tokenizers` object from a GGUF's metadata: byte-level BPE ("gpt2"), SentencePiece's BPE ("llama", and
"gemma4" with its merges written down), its unigram ("t5"), and WordPiece ("bert")."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile, reads_metadata
from octavo.tokenization.merges import check_token_lengths
from octavo.tokenization.parts import TokenizerParts, mark_added, set_bos_eos
from octavo.tokenization.pre_tokenizers import LINES, find_pre_tokenizer
from octavo.tokenization.sentencepiece_backend import (
    SPACE,
    Pieces,
    bpe_backend,
    build,
    finish,
    unigram_backend,
)
from octavo.tokenization.sentencepiece_model import TokenType
from octavo.tokenization.wordpiece import CONTINUES, wordpiece_backend

logger = logging.getLogger(__name__)

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


class _Vocabulary:
    """The `tokenizer.ggml.*` part of the metadata, checked."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.model = self.get("model", "")
        self.tokens: list[str] = self.get("tokens", [])
        if not self.model or not isinstance(self.tokens, list) or not self.tokens:
            raise ModelError(f"{file.path} holds no tokenizer: name one with --tokenizer")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if not all(isinstance(token, str) for token in self.tokens):
            raise self.corrupt("its tokens are not texts")
        if len(self.ids) != len(self.tokens):
            raise self.corrupt("a token occurs twice in its vocabulary")
        types = self.get("token_type")
        if types is None:
            types = np.full(len(self.tokens), TokenType.NORMAL)
        if len(types) != len(self.tokens):
            raise self.corrupt(f"{len(self.tokens)} tokens have {len(types)} types")
        self.types: np.ndarray = np.asarray(types)
        check_token_lengths(self.tokens, file.path)

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
    control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    if vocabulary.model == "bert":
        backend = _wordpiece(vocabulary, special)
    elif vocabulary.model in _KINDS:
        read, add_bos, add_eos = _KINDS[vocabulary.model]
        backend, pre_adds_bos = read(vocabulary)
        mark_added(backend, control, vocabulary.of_type(TokenType.USER_DEFINED))
        add_bos = bool(vocabulary.get("add_bos_token", add_bos or pre_adds_bos))
        add_eos = bool(vocabulary.get("add_eos_token", add_eos))
        set_bos_eos(
            backend,
            _needed(vocabulary, special, "bos_token") if add_bos else None,
            _needed(vocabulary, special, "eos_token") if add_eos else None,
        )
    else:
        raise ModelError(
            f"{path} holds a tokenizer of the kind {vocabulary.model!r}, not {', '.join(_KINDS)} or bert: "
            "name the model's original tokenizer folder with --tokenizer"
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


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    # A merge is "left right"; the left part may itself begin with a space in odd vocabularies.
    lines: list[str] = vocabulary.get("merges", [])
    cuts = [line.find(" ", 1) for line in lines]
    if not lines or min(cuts) < 0:
        raise vocabulary.corrupt("its merges are missing or malformed")
    return [(line[:cut], line[cut + 1 :]) for line, cut in zip(lines, cuts, strict=True)]


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
    backend = Backend(_bpe(vocabulary, _merges(vocabulary), ignore_merges=pre.ignore_merges))
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _pieces(vocabulary: _Vocabulary, **options: Any) -> Pieces:
    scores = vocabulary.get("scores")
    charsmap = vocabulary.get("precompiled_charsmap")
    unknown = vocabulary.get("unknown_token_id")
    if unknown is not None and not 0 <= unknown < len(vocabulary.tokens):
        unknown = None
    return Pieces(
        where=vocabulary.file.path,
        tokens=vocabulary.tokens,
        scores=[] if scores is None else np.asarray(scores, dtype=np.float64).tolist(),
        types=vocabulary.types.tolist(),
        unk_id=unknown,
        byte_fallback=bool((vocabulary.types == TokenType.BYTE).any()),
        charsmap=b"" if charsmap is None else np.asarray(charsmap).astype(np.uint8).tobytes(),
        prefix=bool(vocabulary.get("add_space_prefix", True)),
        **options,
    )


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """Llama 2's kind. The dummy prefix stands before every text between special tokens, as in llama.cpp."""
    return bpe_backend(_pieces(vocabulary)), False


def _sentencepiece_unigram(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """T5's kind."""
    return unigram_backend(
        _pieces(vocabulary, trim=bool(vocabulary.get("remove_extra_whitespaces", False)))
    ), False


def _merged_bpe(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """Gemma 4's kind: as Llama 2's, with ranked merges in place of scores, and lines cut apart."""
    pieces = _pieces(vocabulary)
    model = build(
        pieces,
        BPE,
        vocab=vocabulary.ids,
        merges=_merges(vocabulary),
        unk_token=None if pieces.unk_id is None else pieces.tokens[pieces.unk_id],
        fuse_unk=True,
        byte_fallback=pieces.byte_fallback,
    )
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(LINES), "isolated")
    return finish(backend, pieces), True


def _wordpiece(vocabulary: _Vocabulary, special: dict[str, str]) -> Backend:
    """BERT's kind. In the file a word's first token begins with ▁ and the others are bare."""
    tokens = [
        token if kind == TokenType.CONTROL or _BRACKETED.fullmatch(token)
        else token[1:] if token.startswith(SPACE)
        else CONTINUES + token
        for token, kind in zip(vocabulary.tokens, vocabulary.types.tolist(), strict=True)
    ]  # fmt: skip
    if len(set(tokens)) != len(tokens):
        raise vocabulary.corrupt("a token occurs twice in its vocabulary")
    renamed = dict(zip(vocabulary.tokens, tokens, strict=True))
    special.update({name: renamed[text] for name, text in special.items()})
    special.setdefault("cls_token", special.get("bos_token", "[CLS]"))
    special.setdefault("sep_token", special.get("eos_token", "[SEP]"))
    special.setdefault("unk_token", "[UNK]")
    lower = bool(vocabulary.get("normalizer.lowercase", True))
    settings = {
        "do_lower_case": lower,
        "strip_accents": bool(vocabulary.get("normalizer.strip_accents", lower)),
    }
    return wordpiece_backend(vocabulary.file.path, tokens, special, settings)


_BRACKETED = re.compile(r"\[.+\]")
# How each kind is read, and whether BOS and EOS are added where the file does not say, as in llama.cpp.
_Reader = Callable[[_Vocabulary], "tuple[Backend, bool]"]
_KINDS: dict[str, tuple[_Reader, bool, bool]] = {
    "gpt2": (_byte_level_bpe, False, False),
    "llama": (_sentencepiece_bpe, True, False),
    "t5": (_sentencepiece_unigram, False, True),
    "gemma4": (_merged_bpe, True, False),
}
