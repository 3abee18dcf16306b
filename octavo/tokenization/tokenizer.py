"""Text to token ids and back, from the files of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError, RequestError
from octavo.tokenization.byte_decoder import ByteDecoder
from octavo.tokenization.chat_template import render_chat
from octavo.tokenization.parts import TokenizerParts


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
        self._starts_added = _start_pattern(added.values()) if parts.leading_space else None
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
        return self._backend.encode(self._prepared(text), add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts, on all cores."""
        prepared = [self._prepared(text) for text in texts]
        encodings = self._backend.encode_batch_fast(prepared, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _prepared(self, text: str) -> str:
        """A text as the backend takes it: checked, and with the leading space of `leading_space`."""
        _check_text(text)
        if self._starts_added is None or not text or self._starts_added.match(text):
            return text
        return " " + text

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


def _start_pattern(added: Iterable[AddedToken]) -> re.Pattern[str]:
    """Matches a text that begins with an added token."""
    longest_first = sorted(added, key=lambda token: -len(token.content))
    choices = [(r"\s*" if token.lstrip else "") + re.escape(token.content) for token in longest_first]
    return re.compile("|".join(choices) or r"(?!)")


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
        path: a folder as `read_folder` takes it (tokenizer.json, or a vocabulary in another form, and
            what lies beside it), or a GGUF file.
        tokenizer_override: such a folder or file to use instead of the model's own.

    Raises:
        ModelError: no tokenizer there, or one that cannot be read.
    """
    from octavo.tokenization.folder import read_folder
    from octavo.tokenization.gguf_tokenizer import read_gguf_tokenizer

    place = Path(tokenizer_override).expanduser() if tokenizer_override else Path(path)
    if place.is_file() and place.suffix.lower() == ".gguf":
        return Tokenizer(read_gguf_tokenizer(place))
    if place.is_file() and place.name == "tokenizer.json":
        place = place.parent
    if place.is_dir():
        return Tokenizer(read_folder(place))
    raise ModelError(f"tokenizer {str(place)!r} is neither a folder nor a .gguf file: give one that exists")
