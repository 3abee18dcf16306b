"""Long texts as windows of bounded length, so that every token is scored once, with known context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """A part of a text that is computed on its own.

    Attributes:
        document: number of the text.
        first: position in the text, in tokens, of the first one scored.
        token_ids: what is computed: the prefix (BOS), context, and the scored tokens at the end.
        num_scored: how many at the end are scored, at least one.
    """

    document: int
    first: int
    token_ids: list[int]
    num_scored: int


def make_windows(
    documents: Sequence[Sequence[int]],
    prefix: Sequence[int],
    window: int,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> list[Window]:
    """Cut texts into windows of at most `window` tokens, `prefix` included, which begins each.

    The first window of a text scores all that it holds, but for a first token with nothing before it.
    Each further one scores the next `stride` tokens after those it takes as context, at least one token
    (or the prefix). So with the default stride, the largest, every token but perhaps the first is scored
    once at the least cost; a smaller one gives more context and costs more.

    Args:
        documents: token ids of each text, without special tokens.
        prefix: what the model expects at a text's beginning; may be empty.
        window: most tokens of a window.
        stride: tokens scored by each window after the first.
        max_tokens: most tokens scored in all.

    Raises:
        ConfigError: sizes that leave nothing to score, or texts too short for it.
    """
    room = window - len(prefix)
    context = 0 if prefix else 1
    if room - context < 1:
        raise ConfigError(f"window={window} is too small: give at least {len(prefix) + context + 1}")
    if stride is None:
        stride = room - context
    if not 1 <= stride <= room - context:
        raise ConfigError(
            f"stride={stride} is out of range: with window={window} give from 1 to {room - context}, so that "
            "each token has something before it"
        )
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} is out of range: give at least 1")
    found: list[Window] = []
    left = max_tokens
    for number, ids in enumerate(documents):
        for begin, first, end in _spans(len(ids), room, context, stride):
            if left is not None:
                end = min(end, first + left)
                left -= end - first
            found.append(Window(number, first, [*prefix, *ids[begin:end]], end - first))
            if left == 0:
                return found
    if not found:
        raise ConfigError("the texts have no token with another before it: give longer ones")
    return found


def _spans(length: int, room: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first scored, end) of each window of a text of `length` tokens."""
    begin, first, end = 0, context, min(room, length)
    while first < end:
        yield begin, first, end
        begin, first, end = max(0, end + stride - room), end, min(end + stride, length)


def make_batches(windows: Sequence[Window], rows: int, most: int) -> list[list[Window]]:
    """Neighbouring windows to be computed together: at most `rows` tokens, unless one alone has more,
    and at most `most` windows."""
    batches: list[list[Window]] = []
    held = 0
    for window in windows:
        size = len(window.token_ids)
        if not batches or held + size > rows or len(batches[-1]) == most:
            batches.append([])
            held = 0
        batches[-1].append(window)
        held += size
    return batches
