"""min_p, top_k and top_p as one threshold per row, and the draw from what is left.

Of a row of scaled logits x (logits / temperature), in this order: min_p keeps x >= max + log(min_p);
top_k keeps x >= the k-th largest; top_p keeps x >= the last of the fewest largest whose share of the
remaining probability reaches p. Each keeps all entries that tie with its last one, so the result
does not depend on how equals are ordered. All are exact: no candidate is left out for speed.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.kernels.reference_sampling import gumbel_noise

_CANDIDATES = 1024  # looked at first; rows whose nucleus is larger are sorted whole
HOST_ELEMENTS = 1 << 18  # scaled logits that a host draws from at once; temporaries are many times that
_LOWEST = np.finfo(np.float32).min  # as a threshold it drops nothing but -inf
_MAX_DEVICE_TOP_K = 1024


def host_thresholds(
    x: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, candidates: int = _CANDIDATES
) -> np.ndarray:
    """Thresholds of rows in host memory, from few candidates where these suffice.

    Args:
        x: float32 `[rows, vocab]`, scaled logits.
        top_k: integers `[rows]`, 0 keeps all.
        top_p, min_p: float32 `[rows]`.
        candidates: how many of the largest entries to look at before sorting whole rows.

    Returns:
        float32 `[rows]`: the kept entries of row r are those with `x[r] >= out[r]`; -inf never is.
    """
    vocab = x.shape[1]
    count = min(vocab, max(candidates, int(top_k.max()) + 1))
    out, short = _from_largest(x, count, top_k, top_p, min_p)
    rows = np.flatnonzero(short)
    if rows.size:
        out[rows] = _from_largest(x[rows], vocab, top_k[rows], top_p[rows], min_p[rows])[0]
    return out


def _from_largest(
    x: np.ndarray, count: int, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds from the `count` largest entries, and which rows need more than those."""
    rows, vocab = x.shape
    whole = count == vocab
    largest = x if whole else np.partition(x, vocab - count, axis=-1)[:, vocab - count :]
    largest = np.sort(largest, axis=-1)[:, ::-1]
    top = np.maximum(largest[:, :1], _LOWEST)  # finite even where everything is forbidden
    with np.errstate(divide="ignore"):
        threshold = np.maximum(top[:, 0] + np.log(min_p), _LOWEST)
    kth = largest[np.arange(rows), np.minimum(top_k, count) - 1]
    threshold = np.where(top_k > 0, np.maximum(threshold, kth), threshold)
    # Everything kept so far is among the candidates if the last of them falls below the threshold.
    closed = np.full(rows, True) if whole else largest[:, -1] < threshold
    weights = np.where(largest >= threshold[:, None], np.exp(largest - top, dtype=np.float64), 0.0)
    reached = weights.cumsum(axis=-1)
    total = reached[:, -1].copy()
    nucleus = top_p < 1.0
    open_rows = np.flatnonzero(nucleus & ~closed)
    if open_rows.size:
        part = x[open_rows]
        with np.errstate(under="ignore"):
            weights = np.exp(part - top[open_rows])
        weights[part < threshold[open_rows, None]] = 0.0
        total[open_rows] = weights.sum(axis=-1, dtype=np.float64)
    need = total * top_p
    last = np.minimum((reached < need[:, None]).sum(axis=-1), count - 1)
    short = nucleus & ~closed & (reached[:, -1] < need)
    cut = np.maximum(threshold, largest[np.arange(rows), last])
    # A k-th largest value equal to the last candidate is still exact: it is a value, not a set.
    return np.where(nucleus, cut, threshold).astype(np.float32), short


def draw_on_host(
    x: torch.Tensor,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    k0: torch.Tensor,
    k1: torch.Tensor,
) -> torch.Tensor:
    """Filter and draw rows in host memory; noise is computed for the kept entries only.

    Args:
        x: float32 `[rows, vocab]`, scaled logits.
        top_k, top_p, min_p: as `host_thresholds`.
        k0, k1: integers `[rows]`, the noise's keys.

    Returns:
        int64 `[rows]`; 0 for a row in which everything is forbidden.
    """
    step = max(1, HOST_ELEMENTS // x.shape[1])
    cuts = (slice(lo, lo + step) for lo in range(0, len(x), step))
    return torch.cat(
        [_draw_few(x[cut], top_k[cut], top_p[cut], min_p[cut], k0[cut], k1[cut]) for cut in cuts]
    )


def _draw_few(
    x: torch.Tensor,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    k0: torch.Tensor,
    k1: torch.Tensor,
) -> torch.Tensor:
    """`draw_on_host` of rows all at once."""
    values = x.numpy()
    vocab = values.shape[1]
    keep = values >= host_thresholds(values, top_k, top_p, min_p)[:, None]
    place = np.flatnonzero(keep)
    row, column = np.divmod(place, vocab)
    rows = torch.from_numpy(row)
    noise = gumbel_noise(torch.from_numpy(column), k0[rows], k1[rows]).numpy()
    score = values.reshape(-1)[place] + noise
    best = np.full(len(values), -np.inf, np.float32)
    np.maximum.at(best, row, score)
    hits = np.flatnonzero(score == best[row])[::-1]  # reversed: of equals the lowest index stays
    out = np.zeros(len(values), np.int64)
    out[row[hits]] = column[hits]
    return torch.from_numpy(out)


def device_thresholds(
    x: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    max_top_k: int | None,
    any_top_p: bool,
    any_min_p: bool,
) -> torch.Tensor:
    """The same thresholds on any device, without the host waiting for or looking at a value.

    Args:
        x: float32 `[rows, vocab]`, scaled logits.
        top_k: int32 `[rows]`, at most the vocabulary; top_p, min_p: float32 `[rows]`.
        max_top_k: 0 if no row has a top_k; k if every row has one and none is above k; else None.
        any_top_p, any_min_p: whether some row has top_p below 1, or min_p above 0.

    Returns:
        float32 `[rows, 1]`.
    """
    vocab = x.shape[1]
    lowest = float(_LOWEST)
    # What nobody asks for is left out: on a GPU each operation costs the host a launch.
    threshold = None
    if any_min_p:
        threshold = (x.amax(-1, keepdim=True) + min_p[:, None].log()).clamp_min(lowest)
        if max_top_k == 0 and not any_top_p:
            return threshold
    few = max_top_k if max_top_k is not None and max_top_k <= _MAX_DEVICE_TOP_K else 0
    # On an H200, 64 rows of 151936: sort 0.7 ms, topk 0.2 ms; bisecting the threshold took 9 ms.
    largest = x.topk(few, dim=-1).values if few else x.sort(dim=-1, descending=True).values
    if max_top_k != 0:
        kth = largest.gather(1, torch.where(top_k > 0, top_k, vocab)[:, None].long() - 1)
        threshold = kth.clamp_min(lowest) if threshold is None else torch.maximum(threshold, kth)
    if threshold is None:
        threshold = torch.full_like(x[:, :1], lowest)
    if not any_top_p:
        return threshold
    top = largest[:, :1].clamp_min(lowest)  # finite even where everything is forbidden
    inside = torch.where(largest >= threshold, (largest - top).double().exp(), 0.0)
    reached = inside.cumsum(-1)
    total = reached[:, -1:]
    if few:  # entries that tie with the k-th, beyond the candidates
        beyond = (x >= threshold).sum(-1, keepdim=True) - (largest >= threshold).sum(-1, keepdim=True)
        total = total + beyond * (threshold - top).double().exp()
    last = (reached < total * top_p[:, None]).sum(-1, keepdim=True).clamp_max(largest.shape[1] - 1)
    cut = torch.maximum(threshold, largest.gather(1, last))
    return torch.where(top_p[:, None] < 1.0, cut, threshold)
