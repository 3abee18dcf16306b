"""What changes logits before a token is drawn: bias, allowed tokens, bad words, min_tokens, penalties.

All of it is arithmetic on a slice of rows `[rows, vocab]` at few places: indices are prepared on the
host once per set of slots, what depends on the tokens so far is read from the device's token table.
Nothing is counted from step to step, so a preempted request, a step scheduled ahead and the rows of
a draft under verification see exactly the tokens before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.sampling import state as st
from octavo.sampling.state import BadWords, SamplingState

_GATHER_ELEMENTS = 1 << 22  # tokens looked at in one piece of the penalties


@dataclass
class RowContext:
    """What a slice of rows is conditioned on.

    Attributes:
        settings: int32 `[rows, settings]`, the rows' entries of `SamplingState.table`.
        slots: int64 `[rows]`, each row's slot in the token table.
        num_known: int64 `[rows]`, tokens before the one being chosen.
        max_known: int64 `[rows]` on the host, upper bounds of `num_known`.
        token_table: int32 `[slots, max_model_len]`; the first `num_known` entries of a row's slot are
            its prompt and output (drafts included).
    """

    settings: torch.Tensor
    slots: torch.Tensor
    num_known: torch.Tensor
    max_known: np.ndarray
    token_table: torch.Tensor

    def floats(self, setting: int) -> torch.Tensor:
        """float32 `[rows]`."""
        return self.settings.view(torch.float32)[:, setting].contiguous()

    def integers(self, setting: int) -> torch.Tensor:
        """int32 `[rows]`."""
        return self.settings[:, setting]

    @property
    def seeds(self) -> torch.Tensor:
        """int64 `[rows]`: `noise.seed_state` of each row's seed."""
        return self.settings.view(torch.int64)[:, st.SEED]

    @property
    def num_output(self) -> torch.Tensor:
        """int64 `[rows]`: tokens of the output so far."""
        return self.num_known - self.integers(st.PROMPT_LEN)


@dataclass
class _BadWordIndex:
    """Bad words of a slice of rows: `place` and `row` per word, the others per preceding token."""

    place: torch.Tensor
    word: torch.Tensor
    row: torch.Tensor
    back: torch.Tensor
    token: torch.Tensor


class Scratch:
    """An int32 buffer that is zero whenever nobody holds it: only the places touched are cleaned.

    A user that fails half-way does not give it back, so the next one gets a fresh buffer.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A zero buffer of at least `like.numel()` elements on its device."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.numel() < like.numel():
            buffer = torch.zeros(like.numel(), dtype=torch.int32, device=like.device)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return the buffer, zero again."""
        self._buffer = buffer


class RowProcessors:
    """Indices for one slice of rows, valid as long as the slots keep their settings.

    Places are int64 indices into the flattened `[rows, vocab]` logits.
    """

    def __init__(self, state: SamplingState, slots: np.ndarray, scratch: Scratch):
        self._vocab = state.vocab_size
        self._device = state.device
        flags = state.flags[slots]
        lists = [state.lists[slot] for slot in slots.tolist()]

        def having(flag: int, name: str) -> list[tuple[int, Any]]:
            return [(row, getattr(lists[row], name)) for row in np.flatnonzero(flags & flag).tolist()]

        bias, values = having(st.BIAS, "bias_ids"), having(st.BIAS, "bias_values")
        self._bias = (self._places(bias), self._join([v for _, v in values])) if bias else None
        allowed = having(st.ALLOWED, "allowed_ids")
        self._allowed = (
            (self._join([np.array([row]) for row, _ in allowed]), self._places(allowed)) if allowed else None
        )
        stops = having(st.MIN_TOKENS, "stop_ids")
        self._stops = self._places(stops) if stops else None
        words = having(st.BAD_WORDS, "bad_words")
        self._bad_words = self._index_words(words) if words else None
        self._penalised = np.flatnonzero(flags & st.PENALTY)
        # Without a repetition penalty the prompt does not matter: look at the output only.
        repeats = state.host_float[slots, st.REPETITION] != 1.0
        first = np.where(repeats, 0, state.host[slots, st.PROMPT_LEN])
        self._first = first[self._penalised]
        self._counted = (state.host_float[slots, st.PRESENCE : st.FREQUENCY + 1] != 0).any()
        self._scratch = scratch

    def apply(self, logits: torch.Tensor, context: RowContext) -> None:
        """Change float32 `logits` `[rows, vocab]` (contiguous) in place."""
        flat = logits.view(-1)
        if self._bias is not None:
            flat.index_add_(0, *self._bias)
        if self._allowed is not None:
            rows, places = self._allowed
            kept = flat[places]
            logits.index_fill_(0, rows, float("-inf"))
            flat[places] = kept
        if self._bad_words is not None:
            self._forbid_words(flat, self._bad_words, context)
        if self._stops is not None:
            early = context.num_output < context.integers(st.MIN_OUTPUT)
            _forbid(flat, self._stops, early[self._stops // self._vocab])
        if self._penalised.size:
            self._penalise(flat, context)

    def _forbid_words(self, flat: torch.Tensor, index: _BadWordIndex, context: RowContext) -> None:
        """Forbid a word's last token where the output ends in the tokens before it."""
        position = context.num_known[index.row] - index.back
        outside = position < context.integers(st.PROMPT_LEN)[index.row]
        there = context.token_table[context.slots[index.row], position.clamp_min(0)]
        wrong = (outside | (there != index.token)).to(torch.int32)
        misses = torch.zeros(len(index.place), dtype=torch.int32, device=flat.device)
        misses.index_add_(0, index.word, wrong)
        _forbid(flat, index.place, misses == 0)

    def _penalise(self, flat: torch.Tensor, context: RowContext) -> None:
        widths = context.max_known[self._penalised] - self._first
        step = max(1, _GATHER_ELEMENTS // max(1, int(widths.max())))
        scratch = self._scratch.take(flat) if self._counted else None
        for lo in range(0, len(self._penalised), step):
            part = slice(lo, lo + step)
            width = int(widths[part].max())
            if width > 0:
                host = np.stack((self._penalised[part], self._first[part]))
                rows, first = upload(host.astype(np.int64), self._device)
                self._penalise_rows(flat, context, rows, first[:, None], width, scratch)
        if scratch is not None:
            self._scratch.give_back(scratch)

    def _penalise_rows(
        self,
        flat: torch.Tensor,
        context: RowContext,
        rows: torch.Tensor,
        first: torch.Tensor,
        width: int,
        scratch: torch.Tensor | None,
    ) -> None:
        settings = context.settings[rows][:, :, None]
        floats = context.settings.view(torch.float32)[rows][:, :, None]
        position = first + torch.arange(width, device=flat.device)
        known = position < context.num_known[rows][:, None]
        # Entries beyond the known ones stand for the sequence's first token, so that every place below
        # is one that occurs; equal places get equal values, whichever is written last.
        position = torch.where(known, position, 0)
        token = context.token_table[context.slots[rows][:, None], position]
        place = (rows[:, None] * self._vocab + token).view(-1)
        value = flat[place].view(position.shape)
        repetition = floats[:, st.REPETITION]
        value = torch.where(value > 0, value / repetition, value * repetition)
        if scratch is not None:
            in_output = known & (position >= settings[:, st.PROMPT_LEN])
            scratch.index_add_(0, place, in_output.view(-1).to(torch.int32))
            count = scratch[place].view(position.shape)
            scratch.index_fill_(0, place, 0)
            value = value - floats[:, st.FREQUENCY] * count
            value = value - floats[:, st.PRESENCE] * (count > 0)
        flat[place] = value.view(-1)

    def _index_words(self, words: list[tuple[int, BadWords]]) -> _BadWordIndex:
        before = np.cumsum([0] + [len(w.last) for _, w in words])
        return _BadWordIndex(
            place=self._places([(row, w.last) for row, w in words]),
            word=self._join([w.word + n for n, (_, w) in zip(before, words, strict=False)]),
            row=self._join([np.full(len(w.word), row) for row, w in words]),
            back=self._join([w.back for _, w in words]),
            token=self._join([w.token for _, w in words]),
        )

    def _places(self, ids: list[tuple[int, np.ndarray]]) -> torch.Tensor:
        return self._join([row * self._vocab + tokens for row, tokens in ids])

    def _join(self, arrays: list[np.ndarray]) -> torch.Tensor:
        return upload(np.concatenate(arrays), self._device)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, without waiting for it (through pinned memory on a GPU)."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _forbid(flat: torch.Tensor, places: torch.Tensor, where: torch.Tensor) -> None:
    """Set `flat[places]` to -inf `where` true. Adding, so that a place may be listed twice."""
    flat.index_add_(0, places, torch.zeros_like(places, dtype=flat.dtype).masked_fill_(where, float("-inf")))
