"""Text to token ids and back, from the files of a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError, RequestError
from octavo.tokenization.byte_decoder import ByteDecoder
from octavo.tokenization.chat_template import render_chat

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _ByteTable(dict[int, bytes]):
    """Bytes of each token, found when first asked for; ids that `skip` holds have none.

    Ids beyond the vocabulary (rows that pad a model's embedding) have no bytes either.
    """

    def __init__(self, backend: Backend, decoder: ByteDecoder, skip: frozenset[int], size: int):
        super().__init__()
        self._backend, self._decoder, self._skip, self._size = backend, decoder, skip, size

    def __missing__(self, token_id: int) -> bytes:
        if token_id < 0:
            raise RequestError(f"token id {token_id} is negative: give ids from 0 to {self._size - 1}")
        if token_id >= self._size:
            return b""
        token = None if token_id in self._skip else self._backend.id_to_token(token_id)
        value = self[token_id] = b"" if token is None else self._decoder(token)
        return value


@dataclass(frozen=True)
class TokenizerParts:
    """What a tokenizer is built from.

    Attributes:
        backend: the `tokenizers` object; its post-processor writes BOS and EOS.
        special_tokens: `bos_token`, `eos_token`, … to their text, as chat templates name them.
        chat_templates: name ("default", "tool_use") to Jinja text.
        extra_eos: further tokens that end a turn, by text.
    """

    backend: Backend
    special_tokens: dict[str, str]
    chat_templates: dict[str, str] = field(default_factory=dict)
    extra_eos: tuple[str, ...] = ()


class Tokenizer:
    """A model's tokenizer. Immutable after construction, and safe to share between threads.

    Text is the UTF-8 decoding of the tokens' joined bytes (invalid bytes become U+FFFD), so that
    `decode`, streaming and `token_to_bytes` cannot disagree.

    Attributes:
        vocab_size: one more than the largest id, added tokens included.
        bos_token_id, eos_token_id: None where the model has none.
        eos_token_ids: `eos_token_id` and, from a GGUF, its other ends of a turn.
        all_special_ids: ids that `skip_special_tokens` drops.
        special_tokens: names to texts, as chat templates see them.
    """

    def __init__(self, parts: TokenizerParts):
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._templates = dict(parts.chat_templates)
        self.special_tokens = dict(parts.special_tokens)
        added = backend.get_added_tokens_decoder()
        top = max(added, default=-1)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), top + 1)
        special = {i for i, token in added.items() if token.special}
        special.update(i for i in map(backend.token_to_id, self.special_tokens.values()) if i is not None)
        self.all_special_ids = sorted(special)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        ends = [self.eos_token_id, *(backend.token_to_id(text) for text in parts.extra_eos)]
        self.eos_token_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        decoder = ByteDecoder(json.loads(state))
        self.lead = decoder.lead
        self._bytes = _ByteTable(backend, decoder, frozenset(), self.vocab_size)
        self._bytes_no_special = _ByteTable(backend, decoder, frozenset(special), self.vocab_size)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens that stand in it by name are recognised.

        Args:
            text: any string without lone surrogates.
            add_special_tokens: add BOS and EOS where the model asks for them. False for the text of
                a chat template, which has written them already.

        Raises:
            RequestError: the text holds a lone surrogate.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts, on all cores."""
        for text in texts:
            _check_text(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; ids beyond the vocabulary add nothing.

        Raises:
            RequestError: a negative id.
        """
        data = b"".join(map(self.byte_table(skip_special_tokens).__getitem__, ids))
        return strip_lead(data, self.lead)[0].decode("utf-8", "replace")

    def byte_table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Id to the bytes that it adds to a text (none for special tokens that are skipped)."""
        return self._bytes_no_special if skip_special_tokens else self._bytes

    def token_to_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, as `logprobs` report them; half a character is possible."""
        return self._bytes[token_id]

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token (`Ġthe`, `▁the`); None for an id without one."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        return self._backend.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Every token, in the vocabulary's own spelling, to its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brought a chat template along."""
        return bool(self._templates)

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The Jinja text to use: the one given (by name or as text), else the model's own.

        Raises:
            RequestError: none was given and the model has none.
        """
        if chat_template is not None:
            return self._templates.get(chat_template, chat_template)
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        known = ", ".join(sorted(self._templates))
        raise RequestError(
            (
                f"the model has no default chat template, only {known}"
                if known
                else "the model has no chat template"
            )
            + ": name one with --chat-template (or chat_template=…)",
            "chat_template",
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`.

        Arguments and errors are those of `render_chat`; `chat_template` is a template's text, the
        name of one of the model's, or None for its default.
        """
        return render_chat(
            self.get_chat_template(chat_template, tools),
            messages,
            self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **kwargs,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation: `apply_chat_template`, then `encode` without special tokens."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)


def strip_lead(data: bytes, lead: int) -> tuple[bytes, int]:
    """Take up to `lead` spaces from the start of a text; what is left, and how many may still go.

    A text that has begun with something else has no start any more: the count becomes 0.
    """
    while lead and data:
        if data[0] != 0x20:
            return data, 0
        data, lead = data[1:], lead - 1
    return data, lead


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text of type {type(text).__name__} cannot be tokenized: give a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds the lone surrogate {text[error.start]!r} at character {error.start}: "
            "send valid Unicode"
        ) from None


def load_tokenizer(path: str | Path, tokenizer_override: str | None = None) -> Tokenizer:
    """Load a model's tokenizer.

    Args:
        path: a folder as Hugging Face writes it (tokenizer.json and its companions), or a GGUF file.
        tokenizer_override: such a folder or file to use instead of the model's own.

    Raises:
        ModelError: no tokenizer there, or one that cannot be read.
    """
    from octavo.tokenization.gguf_tokenizer import read_gguf_tokenizer

    place = Path(tokenizer_override).expanduser() if tokenizer_override else Path(path)
    if place.is_file() and place.suffix.lower() == ".gguf":
        return Tokenizer(read_gguf_tokenizer(place))
    if place.is_file() and place.name == "tokenizer.json":
        place = place.parent
    if place.is_dir():
        return Tokenizer(read_folder(place))
    raise ModelError(f"tokenizer {str(place)!r} is neither a folder nor a .gguf file: give one that exists")


def read_folder(folder: Path) -> TokenizerParts:
    """The tokenizer of a Hugging Face folder.

    tokenizer.json alone decides whether BOS and EOS are added, as in Transformers 5: the flags
    `add_bos_token` and `add_eos_token` of tokenizer_config.json are for folders without one.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: add it (Transformers writes it with save_pretrained) "
            "or name another tokenizer with --tokenizer"
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file} cannot be read ({error}): fetch it again") from None
    try:
        return _with_companions(folder, backend)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # a value of the wrong kind
        raise ModelError(
            f"{folder}: tokenizer_config.json or a file beside it is malformed ({error}): fetch them again"
        ) from None


def _with_companions(folder: Path, backend: Backend) -> TokenizerParts:
    """The tokenizer with what the files beside tokenizer.json add: named tokens and chat templates."""
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    known = backend.get_added_tokens_decoder()
    declared = {int(i): entry for i, entry in (config.get("added_tokens_decoder") or {}).items()}
    backend.add_tokens([_added_token(declared[i]) for i in sorted(declared) if i not in known])
    special = {name: text for name in SPECIAL_NAMES if (text := _token_text(named.get(name)))}
    extra = [t for t in map(_token_text, _extra_special(named)) if t]
    already = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [t for t in dict.fromkeys([*special.values(), *extra]) if t not in already]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in missing])
    return TokenizerParts(backend, special, _folder_templates(folder, config))


def set_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make `encode` write BOS before and EOS after a text, each if given."""
    ids = {text: backend.token_to_id(text) for text in (bos, eos) if text is not None}
    for text, token_id in ids.items():
        if token_id is None:
            raise ModelError(
                f"the special token {text!r} is not in the tokenizer's vocabulary: correct its files"
            )
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        pair=[*([bos] if bos else []), "$A", "$B", *([eos] if eos else [])],
        special_tokens=[(text, token_id) for text, token_id in ids.items() if token_id is not None],
    )


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{name: entry[name] for name in names if name in entry})


def _extra_special(named: Mapping[str, Any]) -> list[Any]:
    extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    return list(extra.values()) if isinstance(extra, Mapping) else list(extra)


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object: fetch it again")
    return value


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files win over tokenizer_config.json, as in Transformers."""
    value = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, str):
        value = [{"name": "default", "template": value}]
    templates = {entry["name"]: entry["template"] for entry in value or ()}
    files = {"default": folder / "chat_template.jinja"}
    files.update({file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")})
    for name, file in files.items():
        if file.is_file():
            templates[name] = file.read_text(encoding="utf-8")
    return templates
