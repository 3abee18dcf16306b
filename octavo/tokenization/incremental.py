"""Tokens to text as they come, whole characters only."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.sampling_params import SamplingParams
from octavo.tokenization.tokenizer import Tokenizer, strip_lead

Mark = tuple[bytes, int]


class IncrementalDetokenizer:
    """The text of one choice, growing.

    What `append` and `finish` return adds up to `tokenizer.decode(output_ids)`, save that a space
    which SentencePiece decoding strips from the start of a text is kept when the prompt has text
    already. However tokens are grouped into calls, the sum is the same. A character is held back
    until its last byte has come, so U+FFFD appears only for bytes that no further token can complete:
    invalid ones, and a character that is cut off at the end. A character that the prompt's last
    token began is not the output's: the rest of its bytes are invalid here, as they are to `decode`.

    `params.spaces_between_special_tokens` has nothing to do: neither of the supported decoders puts
    spaces there.

    Args:
        tokenizer: the model's.
        prompt_ids: only their last few tokens are looked at.
        params: `skip_special_tokens` counts.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams):
        self._table = tokenizer.byte_table(params.skip_special_tokens)
        self._pending = b""
        self._lead = tokenizer.lead
        if self._lead and any(self._table[token] for token in reversed(prompt_ids)):
            self._lead = 0

    def append(self, ids: Sequence[int]) -> str:
        """Add tokens; the text that they complete."""
        table = self._table
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[i] for i in ids])
        if self._lead:
            data, self._lead = strip_lead(data, self._lead)
        if self._pending:
            data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        """No token follows: the text of bytes still held back (U+FFFD), if any."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def mark(self) -> Mark:
        """The state to give to `tokens_for` after more tokens have been appended."""
        return self._pending, self._lead

    def tokens_for(self, mark: Mark, ids: Sequence[int], chars: int) -> int:
        """How many of `ids`, appended at `mark`, completed `chars` characters (all, if those never came)."""
        pending, lead = mark
        for count, token in enumerate(ids, 1):
            data, lead = strip_lead(self._table[token], lead)
            data = pending + data
            text, used = codecs.utf_8_decode(data, "replace", False)
            pending = data[used:]
            chars -= len(text)
            if chars <= 0:
                return count
        return len(ids)
