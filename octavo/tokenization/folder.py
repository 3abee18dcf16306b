"""The tokenizer of a Hugging Face folder, whichever of its forms the folder has.

In this order: tokenizer.json; a SentencePiece file; tekken.json; vocab.txt. The first alone decides
whether BOS and EOS are added, as in Transformers 5: the flags `add_bos_token` and `add_eos_token` of
tokenizer_config.json are for folders without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError
from octavo.models import json_file
from octavo.tokenization import sentencepiece_folder, tekken, wordpiece
from octavo.tokenization.parts import SPECIAL_NAMES, TokenizerParts, set_bos_eos
from octavo.tokenization.template_sandbox import MAX_TEMPLATE_CHARS

MAX_JSON_BYTES = 256 << 20
MAX_COMPANION_BYTES = 32 << 20


def read_folder(folder: Path) -> TokenizerParts:
    """The tokenizer of a folder, with its special tokens and chat templates.

    Raises:
        ModelError: no tokenizer there, or one that cannot be read.
    """
    try:
        config = read_json(folder / "tokenizer_config.json")
        named = {**read_json(folder / "special_tokens_map.json"), **config}
        for read in (_from_json, _from_sentencepiece, _from_tekken, _from_vocabulary):
            found = read(folder, config, named)
            if found is not None:
                parts, bos_eos = found
                parts = _with_companions(folder, config, named, parts)
                if bos_eos is not None:
                    _set_bos_eos(parts, named, *bos_eos)
                return parts
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:  # of the wrong kind
        raise ModelError(
            f"{folder}: tokenizer_config.json or a file beside it is malformed "
            f"({' '.join(str(error).split())}): fetch them again"
        ) from None
    raise ModelError(
        f"{folder} has no tokenizer.json (nor tokenizer.model, tekken.json or vocab.txt): add one "
        "(Transformers writes it with save_pretrained) or name another tokenizer with --tokenizer"
    )


Named = Mapping[str, Any]
# A tokenizer, and whether it adds BOS and EOS if the flags do not say; None: its file has said.
Found = tuple[TokenizerParts, "tuple[bool, bool] | None"]


def _from_json(folder: Path, config: Named, named: Named) -> Found | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    _check_size(file, MAX_JSON_BYTES)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file} cannot be read ({' '.join(str(error).split())}): fetch it again") from None
    return TokenizerParts(backend, _special_texts(named, {})), None


def _from_sentencepiece(folder: Path, config: Named, named: Named) -> Found | None:
    file = sentencepiece_folder.find_file(folder)
    if file is None:
        return None
    declared = _declared_tokens(folder, config)
    return sentencepiece_folder.read(
        file,
        named,
        {i: entry["content"] for i, entry in declared.items()},
        lambda d: _special_texts(named, d),
    )


def _from_tekken(folder: Path, config: Named, named: Named) -> Found | None:
    file = folder / tekken.FILE_NAME
    if not file.is_file():
        return None
    backend, defaults = tekken.tekken_backend(file, read_json(file, MAX_JSON_BYTES))
    return TokenizerParts(backend, _special_texts(named, defaults)), (True, False)


def _from_vocabulary(folder: Path, config: Named, named: Named) -> Found | None:
    file = folder / wordpiece.FILE_NAME
    if not file.is_file():
        return None
    special = _special_texts(named, wordpiece.NAMED)
    tokens = wordpiece.read_vocabulary(file)
    return TokenizerParts(wordpiece.wordpiece_backend(file, tokens, special, config), special), None


def _set_bos_eos(parts: TokenizerParts, named: Named, bos: bool, eos: bool) -> None:
    """BOS and EOS as tokenizer_config.json says, else as given."""
    add_bos, add_eos = named.get("add_bos_token", bos), named.get("add_eos_token", eos)
    special = parts.special_tokens
    set_bos_eos(
        parts.backend,
        special.get("bos_token") if add_bos else None,
        special.get("eos_token") if add_eos else None,
    )


def _special_texts(named: Named, defaults: Mapping[str, str]) -> dict[str, str]:
    """`bos_token`, … to their texts: what the files say, else the vocabulary's own (null: none)."""
    texts = {name: token_text(named[name]) if name in named else defaults.get(name) for name in SPECIAL_NAMES}
    return {name: text for name, text in texts.items() if text}


def _declared_tokens(folder: Path, config: Named) -> dict[int, Mapping[str, Any]]:
    """Ids to added tokens: `added_tokens_decoder`, or the older added_tokens.json."""
    declared = {int(i): entry for i, entry in (config.get("added_tokens_decoder") or {}).items()}
    for text, token_id in read_json(folder / "added_tokens.json").items():
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"added_tokens.json gives {text!r} the id {token_id!r}")
        declared.setdefault(token_id, {"content": text, "special": True, "normalized": False})
    return declared


def _with_companions(folder: Path, config: Named, named: Named, parts: TokenizerParts) -> TokenizerParts:
    """The tokenizer with what the files beside it add: further tokens and chat templates."""
    backend = parts.backend
    _add_declared(folder, config, backend, own_ids=(folder / "tokenizer.json").is_file())
    extra = [t for t in map(token_text, _extra_special(named)) if t]
    already = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [t for t in dict.fromkeys([*parts.special_tokens.values(), *extra]) if t not in already]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in missing])
    return TokenizerParts(
        backend,
        parts.special_tokens,
        _templates(folder, config),
        parts.extra_eos,
        parts.leading_space,
    )


def _add_declared(folder: Path, config: Named, backend: Backend, own_ids: bool) -> None:
    """Add the tokens that tokenizer_config.json declares.

    tokenizer.json (`own_ids`) holds its own added tokens, and only new ones are taken, in the order of
    their ids, as Transformers does. Otherwise the declarations are all there is: their flags count for
    tokens of the vocabulary too, and their ids must come true.
    """
    known = backend.get_added_tokens_decoder()
    if own_ids:
        declared = {int(i): entry for i, entry in (config.get("added_tokens_decoder") or {}).items()}
        backend.add_tokens([_added_token(declared[i]) for i in sorted(declared) if i not in known])
        return
    for token_id, entry in sorted(_declared_tokens(folder, config).items()):
        token = _added_token(entry)
        add = backend.add_special_tokens if token.special else backend.add_tokens
        add([token])
        if backend.token_to_id(token.content) != token_id:
            raise ModelError(
                f"{folder}: the added token {token.content[:40]!r} is declared with the id {token_id}, but "
                f"gets {backend.token_to_id(token.content)} after the tokens before it: correct "
                "tokenizer_config.json or added_tokens.json"
            )


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{name: entry[name] for name in names if name in entry})


def _extra_special(named: Named) -> list[Any]:
    extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    return list(extra.values()) if isinstance(extra, Mapping) else list(extra)


def token_text(value: Any) -> str | None:
    """The text of a token as configuration files write it (itself, or an object with `content`)."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _check_size(file: Path, limit: int) -> None:
    size = file.stat().st_size
    if size > limit:
        raise ModelError(
            f"{file} has {size} bytes, more than any tokenizer's ({limit}): fetch it again, or name another "
            "tokenizer with --tokenizer"
        )


def read_json(file: Path, limit: int = MAX_COMPANION_BYTES) -> dict[str, Any]:
    """A JSON object; empty for a file that does not exist.

    Raises:
        ModelError: as `octavo.models.json_file.read_json`.
    """
    if not file.is_file():
        return {}
    _check_size(file, limit)
    return json_file.read_json(file, limit)


def _templates(folder: Path, config: Named) -> dict[str, str]:
    """Templates by name; files win over tokenizer_config.json, as in Transformers."""
    value = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, str):
        value = [{"name": "default", "template": value}]
    templates = {entry["name"]: entry["template"] for entry in value or ()}
    files = {"default": folder / "chat_template.jinja"}
    files.update({file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")})
    for name, file in files.items():
        if file.is_file():
            _check_size(file, 4 * MAX_TEMPLATE_CHARS)
            templates[name] = file.read_text(encoding="utf-8")
    if not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise TypeError("a chat template is not text")
    return templates
