"""Folders whose tokenizer is a SentencePiece file: which file, which ids, which special tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.tokenization.parts import TokenizerParts
from octavo.tokenization.sentencepiece_backend import Pieces, bpe_backend, unigram_backend
from octavo.tokenization.sentencepiece_model import BPE, SentencePieceModel, TokenType, read_sentencepiece

FILE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_T5 = {"T5Tokenizer", "MT5Tokenizer", "UMT5Tokenizer"}
_XLMR = {"XLMRobertaTokenizer"}
_T5_EXTRA_IDS = 100
_MAX_EXTRA_IDS = 1 << 16


def find_file(folder: Path) -> Path | None:
    """The folder's SentencePiece file; None without one."""
    named = [folder / name for name in FILE_NAMES]
    found = [file for file in (*named, *sorted(folder.glob("tokenizer.model.v*"))) if file.is_file()]
    return found[0] if found else None


def read(
    file: Path,
    config: Mapping[str, Any],
    declared: Mapping[int, str],
    special_texts: Callable[[Mapping[str, str]], dict[str, str]],
) -> tuple[TokenizerParts, tuple[bool, bool]]:
    """The tokenizer of a SentencePiece file, without the tokens that the files beside it add.

    The dummy prefix stands once before a text, as in SentencePiece, or before every piece of text
    between special tokens with `legacy` true. It is also everywhere in files that trim spaces (T5,
    XLM-RoBERTa), as in Transformers.

    Args:
        file: the SentencePiece file.
        config: tokenizer_config.json.
        declared: ids to the texts of added tokens; one that replaces a piece renames it.
        special_texts: from a vocabulary's own special tokens to the named ones.

    Returns:
        The tokenizer, and whether it adds BOS and EOS where tokenizer_config.json does not say: BPE
        models get BOS (Llama, Mistral, Gemma), T5 gets EOS, XLM-RoBERTa both.

    Raises:
        ModelError: a corrupt file, or a tokenizer class that numbers its tokens in a way not known here.
    """
    model = read_sentencepiece(file)
    cls = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    add_bos, add_eos = model.kind == BPE, False
    if cls in _XLMR or (not cls and file.name == "sentencepiece.bpe.model"):
        _fairseq_ids(model)
        add_bos = add_eos = True
    elif cls in _T5 or (not cls and file.name == "spiece.model"):
        _extra_ids(file, model, config.get("extra_ids", _T5_EXTRA_IDS))
        add_bos, add_eos = False, True
    elif not file.name.startswith("tokenizer.model"):
        raise ModelError(
            f"{file}: the tokenizer class {cls!r} gives its tokens ids of its own, which are not supported: "
            "write a tokenizer.json with Transformers' save_pretrained, or name another with --tokenizer"
        )
    _rename(model, declared)
    prefix = config.get("add_prefix_space")
    everywhere = model.remove_extra_whitespaces or bool(config.get("legacy"))
    pieces = Pieces(
        where=file,
        tokens=model.tokens,
        scores=model.scores,
        types=model.types,
        unk_id=model.unk_id,
        byte_fallback=model.byte_fallback,
        charsmap=model.charsmap,
        prefix=model.add_dummy_prefix if prefix is None else bool(prefix),
        prefix_everywhere=everywhere,
        trim=model.remove_extra_whitespaces,
        escape=model.escape_whitespaces,
    )
    backend = bpe_backend(pieces) if model.kind == BPE else unigram_backend(pieces)
    ids = {
        "bos_token": model.bos_id,
        "eos_token": model.eos_id,
        "unk_token": model.unk_id,
        "pad_token": model.pad_id,
    }
    special = special_texts({name: text for name, i in ids.items() if (text := model.token(i))})
    parts = TokenizerParts(backend, special, leading_space=pieces.prefix and not everywhere)
    return parts, (add_bos, add_eos)


def _rename(model: SentencePieceModel, declared: Mapping[int, str]) -> None:
    """Placeholder pieces get the texts that are declared for their ids."""
    known = set(model.tokens)
    for token_id, text in declared.items():
        if 0 <= token_id < len(model.tokens) and model.tokens[token_id] != text and text not in known:
            model.tokens[token_id] = text
            known.add(text)


def _fairseq_ids(model: SentencePieceModel) -> None:
    """XLM-RoBERTa's ids: four tokens in place of the first three pieces, and a mask at the end."""
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    model.tokens = [*first, *model.tokens[3:], "<mask>"]
    model.scores = [0.0] * 4 + model.scores[3:] + [0.0]
    model.types = [
        TokenType.CONTROL,
        TokenType.CONTROL,
        TokenType.CONTROL,
        TokenType.UNKNOWN,
        *model.types[3:],
        TokenType.CONTROL,
    ]
    model.bos_id, model.pad_id, model.eos_id, model.unk_id = 0, 1, 2, 3


def _extra_ids(file: Path, model: SentencePieceModel, count: object) -> None:
    """T5's sentinels after the pieces, the last one first."""
    if type(count) is not int or not 0 <= count <= _MAX_EXTRA_IDS:
        raise ModelError(
            f"{file}: extra_ids={count!r} is not a count of tokens: correct tokenizer_config.json"
        )
    extra = [f"<extra_id_{i}>" for i in range(count - 1, -1, -1)]
    extra = [token for token in extra if token not in set(model.tokens)]
    model.tokens += extra
    model.scores += [0.0] * len(extra)
    model.types += [TokenType.CONTROL] * len(extra)
