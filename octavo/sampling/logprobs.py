"""Log-probabilities of sampled and of prompt tokens: computed in slices, sent packed, unpacked late.

They describe the model's own distribution: log_softmax of the logits before bias, penalties,
temperature and filters (vLLM's default, `raw_logprobs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from octavo.kernels import ops
from octavo.step_messages import TokenLogprobs

SLICE_ELEMENTS = 1 << 24  # float32 logits held at once (64 MiB); temporaries are a few times that
_WIDE = 64  # requests for more than this many are computed apart, lest all pay for one


@dataclass
class _Part:
    """Packed rows: `rows` are their numbers in the batch, `counts` how many top entries each reports."""

    rows: np.ndarray
    counts: np.ndarray
    width: int


@dataclass
class PackedLogprobs:
    """Log-probabilities of some rows of a batch, still on the device.

    `data` (int32, one dimension) is all there is to transfer; `unpack` takes its host copy. A row of a
    part of width w is: token, w top tokens, their w + 1 values as float32 bits, rank.
    """

    data: torch.Tensor
    num_rows: int
    parts: list[_Part] = field(default_factory=list)

    def unpack(self, data: np.ndarray) -> list[TokenLogprobs | None]:
        """One entry per row of the batch, None where none were asked for. `data`: the host's copy."""
        out: list[TokenLogprobs | None] = [None] * self.num_rows
        start = 0
        for part in self.parts:
            size = len(part.rows) * (2 * part.width + 3)
            packed = data[start : start + size].reshape(len(part.rows), -1)
            start += size
            ids = packed[:, : part.width + 1].tolist()
            values = packed[:, part.width + 1 : -1].copy().view(np.float32).tolist()
            ranks = packed[:, -1].tolist()
            for i, (row, count) in enumerate(zip(part.rows.tolist(), part.counts.tolist(), strict=True)):
                out[row] = TokenLogprobs(ids[i][: count + 1], values[i][: count + 1], ranks[i])
        return out


def token_logprobs(
    logits_of: Callable[[np.ndarray], torch.Tensor],
    targets_of: Callable[[np.ndarray], torch.Tensor],
    rows: np.ndarray,
    counts: np.ndarray,
    num_rows: int,
    vocab_size: int,
) -> PackedLogprobs:
    """Log-probabilities of one target token per row and of each row's likeliest tokens.

    Args:
        logits_of: gives the logits `[m, vocab]` (any float type, not changed) of m rows by number
            (ascending); called with few rows at a time, so that they can be computed on demand.
        targets_of: gives the same rows' tokens, integers `[m]` on the logits' device.
        rows: integers `[n]`, ascending, at least one: the rows that report.
        counts: integers `[n]`, top tokens each reports besides the target; -1: the whole vocabulary.
        num_rows: rows of the whole batch.
        vocab_size: columns of the logits.

    Ranks count from 1: one more than the tokens strictly likelier than the target.
    """
    counts = np.where((counts < 0) | (counts > vocab_size), vocab_size, counts)
    data: list[torch.Tensor] = []
    parts: list[_Part] = []
    for chosen in (counts <= _WIDE, counts > _WIDE):
        some, some_counts = rows[chosen], counts[chosen]
        width = int(some_counts.max()) if some.size else 0
        step = max(1, SLICE_ELEMENTS // (vocab_size + 4 * width))
        for lo in range(0, len(some), step):
            part = some[lo : lo + step]
            data.append(_pack(logits_of(part).float(), targets_of(part).long()[:, None], width).view(-1))
            parts.append(_Part(part, some_counts[lo : lo + step], width))
    return PackedLogprobs(data[0] if len(data) == 1 else torch.cat(data), num_rows, parts)


def prompt_logprobs(
    logits_of: Callable[[int, int], torch.Tensor], targets: torch.Tensor, counts: np.ndarray, vocab_size: int
) -> PackedLogprobs:
    """Log-probabilities of prompt tokens, for any number of requests at once.

    Args:
        logits_of: gives the logits `[hi - lo, vocab]` of rows lo..hi-1, typically by applying the
            head to that slice of the hidden states; never asked for more than a bounded slice.
        targets: integers `[m]` on the device, the token that follows each row in its prompt.
        counts: integers `[m]` on the host, top tokens to report; -1: the whole vocabulary.
    """
    span = np.arange(len(targets))

    def logits_at(rows: np.ndarray) -> torch.Tensor:
        lo, hi = int(rows[0]), int(rows[-1]) + 1
        if hi - lo == len(rows):
            return logits_of(lo, hi)
        return torch.cat([logits_of(row, row + 1) for row in rows.tolist()])

    def targets_at(rows: np.ndarray) -> torch.Tensor:
        lo, hi = int(rows[0]), int(rows[-1]) + 1
        if hi - lo == len(rows):
            return targets[lo:hi]
        return torch.stack([targets[row] for row in rows.tolist()])

    return token_logprobs(logits_at, targets_at, span, np.asarray(counts), len(targets), vocab_size)


def _count(flags: torch.Tensor) -> torch.Tensor:
    """How many of each row's flags are set, int64 `[rows, 1]`."""
    if flags.device.type == "cpu":  # PyTorch would add up a copy in 64 bits
        return torch.from_numpy(np.asarray(np.count_nonzero(flags.numpy(), axis=-1, keepdims=True), np.int64))
    return flags.sum(-1, keepdim=True)


def _pack(logits: torch.Tensor, target: torch.Tensor, width: int) -> torch.Tensor:
    """int32 `[rows, 2 * width + 3]`: target, top tokens, values (float32 bits), rank."""
    normaliser = ops.logsumexp(logits)
    chosen = logits.gather(1, target)
    rank = 1 + _count(logits > chosen)
    values, ids = _largest(logits, width)
    values = torch.cat((chosen, values), 1) - normaliser
    return torch.cat((target.int(), ids.int(), values.view(torch.int32), rank.int()), 1)


def _largest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    if width > logits.shape[1] // 8 and logits.device.type == "cpu":
        # PyTorch's sort of whole rows is many times slower than NumPy's.
        order = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :width]
        ids = torch.from_numpy(np.ascontiguousarray(order))
        return logits.gather(1, ids), ids
    if logits.device.type == "cpu":
        values, ids = logits.topk(width, dim=-1)
        return values, ids
    # A GPU's top-k takes equals (of which logits in bfloat16 have many) as its work is cut, by the number of
    # rows; a row's answer must not depend on the others.
    ids = ops.ranking_keys(logits).topk(width, dim=-1).indices
    return logits.gather(1, ids), ids
