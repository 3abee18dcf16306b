"""Mistral's tekken.json: byte-level BPE whose tokens have ranks and no merges.

Format, as mistral-common writes and reads it: `config` (the expression that cuts words, the sizes),
`vocab` (rank, bytes in base64), `special_tokens` (rank, text). Ids are the special tokens first, filled
up with `<SPECIAL_n>` to `default_num_special_tokens`, then the ranks; what the file holds beyond
`default_vocab_size` is not part of the model. Merging is tiktoken's: a word that is a token is that
token, otherwise the adjacent pair whose joined token has the lowest rank is joined first.
"""

from __future__ import annotations

import binascii
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from octavo.errors import ModelError
from octavo.tokenization.byte_decoder import BYTES
from octavo.tokenization.merges import check_token_lengths, ranked_merges
from octavo.tokenization.parts import mark_added

FILE_NAME = "tekken.json"
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MAX_SPECIAL_TOKENS = 1 << 16
# Files of versions up to 7 name no special tokens; these are theirs.
_OLD_SPECIAL_TOKENS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
    "[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] "
    "[/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
_SPELLED = "".join(chr(char) for char, byte in sorted(BYTES.items(), key=lambda item: item[1]) if byte < 256)


def tekken_backend(file: Path, content: dict[str, Any]) -> tuple[Backend, dict[str, str]]:
    """The tokenizer of a tekken.json, without BOS or EOS, and its named special tokens.

    Args:
        file: for errors.
        content: the parsed file.

    Raises:
        ModelError: a corrupt file.
    """
    try:
        return _build(file, content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _corrupt(file, f"{type(error).__name__}: {error}") from None


def _corrupt(file: Path, what: str) -> ModelError:
    return ModelError(
        f"{file}: corrupt tekken tokenizer ({' '.join(what.split())[:200]}): fetch it again or name another "
        "one with --tokenizer"
    )


def _build(file: Path, content: dict[str, Any]) -> tuple[Backend, dict[str, str]]:
    config = content["config"]
    special = _special_tokens(file, content, config)
    entries = content["vocab"]
    size = config.get("default_vocab_size", len(entries) + len(special))
    if type(size) is not int or not len(special) < size <= len(entries) + len(special):
        raise _corrupt(
            file, f"default_vocab_size is {size}, with {len(entries)} tokens and {len(special)} special"
        )
    ranked = _ranked(file, entries[: size - len(special)])
    check_token_lengths(ranked, file)
    vocabulary = {token: i for i, token in enumerate(special)}
    for rank, token in enumerate(ranked):
        if vocabulary.setdefault(token, rank + len(special)) != rank + len(special):
            raise _corrupt(file, f"the token of rank {rank} occurs twice")
    known = set(ranked)
    missing = set(_SPELLED) - known
    if missing:
        raise _corrupt(file, f"{len(missing)} of the 256 bytes have no token")
    merges = ranked_merges(enumerate(ranked), known)
    try:
        backend = Backend(BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
        split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    except Exception as error:  # the library raises plain Exception
        raise _corrupt(file, str(error)) from None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    mark_added(backend, special)
    return backend, {name: text for name, text in NAMED.items() if text in special}


def _special_tokens(file: Path, content: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Texts of the special tokens, by id, with the fillers."""
    entries = content.get("special_tokens")
    if entries is None:
        known = list(_OLD_SPECIAL_TOKENS)
    else:
        by_rank = {entry["rank"]: entry["token_str"] for entry in entries}
        if len(by_rank) != len(entries) or sorted(by_rank) != list(range(len(by_rank))):
            raise _corrupt(file, "the ranks of its special tokens are not 0, 1, 2, …")
        known = [by_rank[rank] for rank in range(len(by_rank))]
    count = config.get("default_num_special_tokens", len(known))
    if type(count) is not int or not len(known) <= count <= MAX_SPECIAL_TOKENS:
        raise _corrupt(
            file,
            f"default_num_special_tokens is {count}, with {len(known)} named "
            f"(at most {MAX_SPECIAL_TOKENS} are read)",
        )
    tokens = known + [f"<SPECIAL_{i}>" for i in range(len(known), count)]
    if len(set(tokens)) != len(tokens) or not all(isinstance(t, str) and t for t in tokens):
        raise _corrupt(file, "a special token occurs twice or has no text")
    return tokens


def _ranked(file: Path, entries: list[dict[str, Any]]) -> list[str]:
    """The tokens by rank, in the byte-level spelling."""
    ranked = []
    for rank, entry in enumerate(entries):
        if entry.get("rank", rank) != rank:
            raise _corrupt(file, f"the token at place {rank} has the rank {entry['rank']}")
        encoded = entry["token_bytes"]
        try:
            data = binascii.a2b_base64(encoded)
        except (binascii.Error, ValueError) as error:
            raise _corrupt(file, f"the bytes of token {rank} are not base64: {error}") from None
        if not data or binascii.b2a_base64(data, newline=False).decode() != encoded:
            raise _corrupt(file, f"the bytes of token {rank} are not base64, or none")
        ranked.append(data.decode("latin-1").translate(_SPELLED))
    return ranked
