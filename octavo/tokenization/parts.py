"""What every reader of tokenizer files hands over, and how BOS and EOS are written into it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerParts:
    """What a tokenizer is built from.

    Attributes:
        backend: the `tokenizers` object; its post-processor writes BOS and EOS.
        special_tokens: `bos_token`, `eos_token`, … to their text, as chat templates name them.
        chat_templates: name ("default", "tool_use") to Jinja text.
        extra_eos: further tokens that end a turn, by text.
        leading_space: a text that does not begin with an added token gets one space before it (the
            dummy prefix of SentencePiece where it stands once a text, not once a piece of it).
    """

    backend: Backend
    special_tokens: dict[str, str]
    chat_templates: dict[str, str] = field(default_factory=dict)
    extra_eos: tuple[str, ...] = ()
    leading_space: bool = False


def set_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make `encode` write BOS before and EOS after a text, each if given.

    Raises:
        ModelError: a token that the vocabulary lacks.
    """
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


def mark_added(backend: Backend, special: Iterable[str], plain: Iterable[str] = ()) -> None:
    """Make tokens of the vocabulary be found in text by name: special ones, and ordinary ones."""
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special if t])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain if t])
