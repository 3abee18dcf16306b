"""From logits to tokens: one pipeline for plain decoding and for judging drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels import ops
from octavo.sampling import state as st
from octavo.sampling.filters import device_thresholds, draw_on_host
from octavo.sampling.logprobs import SLICE_ELEMENTS, PackedLogprobs, token_logprobs
from octavo.sampling.noise import row_keys
from octavo.sampling.processors import RowContext, RowProcessors, Scratch, upload
from octavo.sampling.state import SamplingState

_MAX_PLANS = 16


@dataclass
class SampleOutput:
    """What the sampler yields, on the device.

    Attributes:
        tokens: int32 `[rows]`.
        logprobs: log-probabilities of the rows that ask for them; None if no row does.
    """

    tokens: torch.Tensor
    logprobs: PackedLogprobs | None = None


@dataclass(frozen=True)
class RowMasks:
    """Which tokens some rows may draw.

    Attributes:
        rows: int64 `[m]` on the device, each once.
        bits: int32 `[m, ceil(vocab / 32)]` on the device, as `octavo.step_messages.TokenMasks`.
    """

    rows: torch.Tensor
    bits: torch.Tensor


@dataclass
class _Piece:
    """Rows that take the same path together: few enough to be held in float32 at once.

    `rows` None means the whole batch, in order.
    """

    rows: np.ndarray | None
    rows_device: torch.Tensor | None
    needs: int
    processors: RowProcessors | None
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


class Sampler:
    """Chooses a token for each row of logits, as the settings of the row's slot ask.

    In this order: the form of the output (structured_outputs), logit_bias, allowed_token_ids, bad_words,
    min_tokens, repetition / frequency / presence penalty, temperature, min_p, top_k, top_p, then the
    Gumbel-max draw. A row pays only for what it asks for; greedy rows without settings are one argmax. The
    result of a row depends on its logits, settings, seed and known tokens alone, not on the rows beside it.
    On a GPU the host neither waits for nor looks at a value of the device.
    """

    def __init__(self, state: SamplingState):
        self.state = state
        self._on_host = state.device.type == "cpu"
        self._scratch = Scratch()
        self._plans: dict[bytes, list[_Piece]] = {}
        self._plans_version = -1
        self._needs_key = (-1, b"")
        self._needs_found = 0

    def __call__(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        slots_device: torch.Tensor,
        num_known: torch.Tensor,
        token_table: torch.Tensor,
        max_known: np.ndarray | None = None,
        masks: RowMasks | None = None,
        given: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Sample one token per row.

        Args:
            logits: `[rows, vocab]`, any float type; where a mask forbids a token they may become -inf, else
                they are not changed.
            slots: int32 `[rows]` on the host; a slot may occur in several rows (drafts).
            slots_device: the same on the device, int32 or int64.
            num_known: integers `[rows]` on the device: tokens known before the one being chosen, and so
                its position. Row i of a verification passes the request's number plus i.
            token_table: int32 `[slots, max_model_len]` on the device, all known tokens (and drafts).
            max_known: integers `[rows]` on the host, upper bounds of `num_known`; bounds the work of
                penalties. Without it they look at the whole table on a GPU.
            masks: for rows whose slots have a form (`state.GRAMMAR`).
            given: int32 `[rows]`, the tokens that rows yield whatever is drawn there; -1: what is drawn.
        """
        rows, vocab = logits.shape
        if vocab != self.state.vocab_size:
            raise ValueError(f"logits have {vocab} columns, the sampler was made for {self.state.vocab_size}")
        if rows == 0:
            return SampleOutput(torch.empty(0, dtype=torch.int32, device=logits.device))
        needs = self._needs(slots)
        own = logits
        if masks is not None:
            logits = logits.clone() if needs & st.LOGPROBS else logits  # those tell of the model's own
            ops.forbid_tokens(logits, masks.rows, masks.bits)
        if not needs & ~(st.LOGPROBS | st.GRAMMAR):
            tokens = _int32(ops.argmax(logits))
        else:
            self.state.flush()
            tokens = self._draw_pieces(logits, slots, slots_device, num_known, token_table, max_known)
        if given is not None:
            tokens = torch.where(given >= 0, given, tokens)
        if not needs & st.LOGPROBS:
            return SampleOutput(tokens)
        return SampleOutput(tokens, self._logprobs(own, slots, tokens))

    def is_greedy(self, slots: np.ndarray) -> bool:
        """Whether all rows take the likeliest token and report nothing else of it."""
        return not self._needs(slots)

    def draws(self, slots: np.ndarray) -> bool:
        """Whether some row takes another token than the likeliest by chance."""
        return bool(self._needs(slots) & st.RANDOM)

    def reads_tokens(self, slots: np.ndarray) -> bool:
        """Whether some row's choice depends on more of the tokens before it than how many there are."""
        return bool(self._needs(slots) & (st.PENALTY | st.BAD_WORDS))

    def _needs(self, slots: np.ndarray) -> int:
        """What the rows need, all together; remembered while the same slots come with the same settings."""
        key = (self.state.version, slots.tobytes())
        if key != self._needs_key:
            self._needs_key = key
            self._needs_found = int(np.bitwise_or.reduce(self.state.flags[slots]))
        return self._needs_found

    def _draw_pieces(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        slots_device: torch.Tensor,
        num_known: torch.Tensor,
        token_table: torch.Tensor,
        max_known: np.ndarray | None,
    ) -> torch.Tensor:
        if max_known is None:
            max_known = num_known.numpy() if self._on_host else np.full(len(slots), self.state.max_model_len)
        settings = self.state.table.index_select(0, slots_device)
        context = RowContext(settings, slots_device.long(), num_known.long(), max_known, token_table)
        pieces = self._plan(slots)
        if len(pieces) == 1 and pieces[0].rows is None:
            return self._draw(logits, pieces[0], context).to(torch.int32)
        tokens = torch.empty(len(slots), dtype=torch.int32, device=logits.device)
        for piece in pieces:
            rows, index = piece.rows, piece.rows_device
            assert rows is not None and index is not None
            part = RowContext(
                settings.index_select(0, index),
                context.slots[index],
                context.num_known[index],
                max_known[rows],
                token_table,
            )
            tokens[index] = self._draw(logits.index_select(0, index), piece, part).to(torch.int32)
        return tokens

    def _draw(self, logits: torch.Tensor, piece: _Piece, context: RowContext) -> torch.Tensor:
        """int64 `[rows]` of one piece."""
        if piece.processors is not None:
            # A piece with `rows` already has its own copy of the logits; the caller's stay as they are.
            logits = logits.to(torch.float32, copy=piece.rows is None).contiguous()
            piece.processors.apply(logits, context)
        if not piece.needs & st.RANDOM:
            return ops.argmax(logits)
        k0, k1 = self._keys(context)
        temperature = context.floats(st.TEMPERATURE)
        if not piece.needs & st.FILTER:
            return ops.gumbel_argmax(logits, temperature, k0, k1)
        scaled = logits.float() / temperature[:, None]
        if self._on_host:
            return draw_on_host(scaled, piece.top_k, piece.top_p, piece.min_p, k0, k1)
        thresholds = device_thresholds(
            scaled,
            context.integers(st.TOP_K),
            context.floats(st.TOP_P),
            context.floats(st.MIN_P),
            max_top_k=int(piece.top_k.max()) if piece.top_k.all() or not piece.top_k.any() else None,
            any_top_p=bool((piece.top_p < 1.0).any()),
            any_min_p=bool((piece.min_p > 0.0).any()),
        )
        scaled.masked_fill_(scaled < thresholds, float("-inf"))
        return ops.gumbel_argmax(scaled, torch.ones_like(temperature), k0, k1)

    def _keys(self, context: RowContext) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._on_host:
            return row_keys(context.seeds, context.num_known)
        k0, k1 = row_keys(context.seeds.numpy(), context.num_known.numpy())  # a third of PyTorch's overhead
        return torch.from_numpy(k0), torch.from_numpy(k1)

    def _plan(self, slots: np.ndarray) -> list[_Piece]:
        """How to cut the batch, remembered while the same slots come with the same settings."""
        if self._plans_version != self.state.version or len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
            self._plans_version = self.state.version
        key = slots.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(slots)
        return plan

    def _make_plan(self, slots: np.ndarray) -> list[_Piece]:
        flags = self.state.flags[slots]
        filtered = (flags & st.FILTER) != 0
        processed = ~filtered & ((flags & st.PROCESS) != 0)
        plain = ~filtered & ~processed
        if plain.all():  # needs no copy, so it needs no slices either
            return [self._piece(slots, None)]
        step = max(1, SLICE_ELEMENTS // self.state.vocab_size)
        pieces = []
        for chosen in (plain, processed, filtered):
            rows = np.flatnonzero(chosen)
            if len(rows) == len(slots) <= step:
                return [self._piece(slots, None)]
            pieces += [self._piece(slots, rows[lo : lo + step]) for lo in range(0, len(rows), step)]
        return pieces

    def _piece(self, slots: np.ndarray, rows: np.ndarray | None) -> _Piece:
        state = self.state
        slots = slots if rows is None else slots[rows]
        needs = int(np.bitwise_or.reduce(state.flags[slots]))
        return _Piece(
            rows=rows,
            rows_device=None if rows is None else upload(rows, state.device),
            needs=needs,
            processors=RowProcessors(state, slots, self._scratch) if needs & st.PROCESS else None,
            top_k=state.host[slots, st.TOP_K],
            top_p=state.host_float[slots, st.TOP_P],
            min_p=state.host_float[slots, st.MIN_P],
        )

    def _logprobs(self, logits: torch.Tensor, slots: np.ndarray, tokens: torch.Tensor) -> PackedLogprobs:
        rows = np.flatnonzero(self.state.flags[slots] & st.LOGPROBS)
        counts = self.state.logprobs[slots[rows]]

        def pick(source: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
            if len(chosen) == len(slots):
                return source
            return source.index_select(0, upload(chosen, self.state.device))

        return token_logprobs(
            lambda part: pick(logits, part),
            lambda part: pick(tokens, part),
            rows,
            counts,
            len(slots),
            self.state.vocab_size,
        )


def _int32(tokens: torch.Tensor) -> torch.Tensor:
    """Integers as int32. On a CPU by NumPy: PyTorch's conversion costs many times as much host time."""
    if tokens.device.type == "cpu":
        return torch.from_numpy(tokens.numpy().astype(np.int32))
    return tokens.to(torch.int32)
