"""Plain versions of the kernels between a step that judges drafts and the drafts after it, all of which stay
on the device.

Requests, slots and rows are those of `octavo.kernels.reference_batch`. Where a recorded step is padded, the
requests at its end have no rows and the padding's slot, and rows at its end belong to nobody.
"""

from __future__ import annotations

import torch

from octavo.kernels.splitmix import judgement_uniforms


def judge_drafts(
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    chosen: torch.Tensor,
    stands: torch.Tensor | None,
    token_table: torch.Tensor,
    num_computed: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    known: torch.Tensor,
) -> None:
    """Which drafts stand: those that are the tokens chosen at their places, if all before them do. They and
    the token chosen behind them are appended; what did not stand is not computed any more.

    Args:
        slots: int64 `[n]`; starts: int32 `[n + 1]`; ends: int64 `[n]`, tokens computed after the step.
        drafts: int64 `[n]`, how many of a request's last rows compute drafts, at most k. The row before them
            and theirs choose a token each.
        chosen: int32 or int64 `[rows]`, the token chosen in each row.
        stands: bool `[n, k]`, which drafts are to stand if all before them do, whatever is chosen; None: the
            chosen tokens decide.
        token_table: int32 `[slots, max_model_len]`, read (drafts are a request's last tokens) and written.
        num_computed: int64 `[slots]`, written.
        tokens: int32 `[n, k + 1]`, written: of a request with fewer than k drafts the last one again in the
            columns that are too many.
        counts: int32 `[n]`, written: how many leading ones of them stand, at least 1.
        known: int64 `[n]`, written: tokens known after that.
    """
    width = tokens.shape[1]
    column = torch.arange(width, device=slots.device)[None]
    before = ends - drafts
    place = torch.minimum(column, drafts[:, None])
    row = (starts[1:].long() - 1 - drafts)[:, None] + place
    own = chosen[row].to(torch.int32)
    at = (before[:, None] + column[:, :-1]).clamp_max(token_table.shape[1] - 1)
    drafted, is_draft = token_table[slots[:, None], at], column[:, :-1] < drafts[:, None]
    if stands is None:
        good = is_draft & (drafted == own[:, :-1])
    else:
        good = is_draft & stands
        own[:, :-1] = torch.where(good, drafted, own[:, :-1])
    counts.copy_(1 + good.int().cumprod(-1).sum(-1))
    tokens.copy_(own)
    token_table[slots[:, None], before[:, None] + place] = own
    torch.add(before, counts, out=known)
    num_computed[slots] = known - 1


def stands_by_chance(
    slots: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    states: torch.Tensor,
    rates: torch.Tensor,
    stands: torch.Tensor,
) -> None:
    """Which drafts stand if all before them do, where chance judges (synthetic acceptance).

    Args:
        slots, ends, drafts: as `judge_drafts` takes them.
        states: int64 `[m]` (any stride), `seed_state` of the slots' requests; those from m on have the last.
        rates: float64 `[>= k]`, how likely each draft is to stand.
        stands: bool `[n, k]`, written.
    """
    place = (ends - drafts)[:, None] + torch.arange(stands.shape[1], device=slots.device)
    own = states[slots.clamp_max(len(states) - 1)]
    stands.copy_(judgement_uniforms(own[:, None], place) < rates[: stands.shape[1]])


def begin_follow(
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    begin: torch.Tensor,
    first: torch.Tensor,
    limit: torch.Tensor,
    shift: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """Where a judged step's rows come into a head's cache, as `place_rows` takes it.

    Args:
        slots, starts, ends, drafts, counts: as `judge_drafts` takes and writes them.
        begin: int64 `[slots]`, position of a slot's first row in the head's cache.
        first, limit, shift: int64 `[n]`, written.
        last: int64 `[n]`, written: of each request the row of its newest token but one, the last that stands.
    """
    own = begin[slots]
    torch.sub(ends, own, out=limit)
    torch.sub(limit, (starts[1:] - starts[:-1]).long(), out=first)
    torch.add(own, 1, out=shift)
    last.copy_(starts[1:].long() - drafts + counts - 2)


def begin_chain(
    slots: torch.Tensor,
    known: torch.Tensor,
    counts: torch.Tensor,
    begin: torch.Tensor,
    first: torch.Tensor,
    limit: torch.Tensor,
    shift: torch.Tensor,
) -> None:
    """Where a head's drafts come into its cache, as `place_rows` takes it.

    Args:
        slots, known, counts: as `append_drafts` takes them.
        begin, first, limit, shift: as `begin_follow`'s; without drafts the limit is 0.
    """
    own = begin[slots]
    torch.sub(known - 2, own, out=first)
    torch.add(own, 1, out=shift)
    limit.copy_((first + counts).masked_fill(counts == 0, 0))


def place_rows(
    slots: torch.Tensor,
    starts: torch.Tensor,
    first: torch.Tensor,
    limit: torch.Tensor,
    shift: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    offset: int,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_rows: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The rows of a drafting pass. Those at or beyond their request's limit, before position 0, or nobody's
    are stored nowhere: their shape is fixed, and their results are nobody's.

    Args:
        slots: int64 `[n]`; starts: int32 `[n + 1]`, of rows.
        first: int64 `[n]`; `first + offset` is the position of a request's first row in the draft's cache.
        limit: int64 `[n]`, positions below are the request's; 0: none.
        shift: int64 `[n]`, the position in the token table of a row's token is its own and this.
        token_table: int32 `[slots, max_model_len]`; block_table: int32 `[slots, width]`, the draft's.
        block_size: tokens in a block, a power of two.
        token_ids: int32 `[rows]`, written; positions: int64 `[rows]`, written, each within the limit.
        seq_lens: int32 `[n]`, written: the position behind a request's last row, its rows at least.
        block_rows: int32 `[n, >= width]`, its first `width` columns written.
        slot_mapping: int64 `[rows]`, written: `block * block_size + place` or -1.
    """
    count, rows = (starts[1:] - starts[:-1]).long(), torch.arange(len(token_ids), device=slots.device)
    request = torch.searchsorted(starts[1:].contiguous(), rows.to(torch.int32), right=True)
    owned = request < len(slots)
    request = request.clamp_max(len(slots) - 1)
    begin = first + offset
    at = begin[request] + rows - starts[request]
    live = owned & (at >= 0) & (at < limit[request])
    within = torch.where(owned, torch.minimum(at, limit[request] - 1).clamp_min(0), 0)
    positions.copy_(within)
    slot, last = slots[request], token_table.shape[1] - 1
    token_ids.copy_(torch.where(owned, token_table[slot, (within + shift[request]).clamp(0, last)], 0))
    blocks = block_table[slot, (within // block_size).clamp_max(block_table.shape[1] - 1)].long()
    slot_mapping.copy_(torch.where(live, blocks * block_size + within % block_size, -1))
    seq_lens.copy_(torch.maximum(begin + count, count))
    block_rows[:, : block_table.shape[1]] = block_table[slots]


def append_drafts(
    slots: torch.Tensor,
    known: torch.Tensor,
    counts: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor | None,
    token_table: torch.Tensor,
    offset: int,
) -> None:
    """Write a draft behind the known tokens of each request that is to have so many.

    Args:
        slots, known: int64 `[n]`.
        counts: int64 `[n]`, drafts of each; those of at most `offset` get none here.
        tokens: int64 `[n]` (any stride).
        ids: int64, what to write for each of the tokens; None: themselves.
        token_table: int32 `[slots, max_model_len]`; entry `[slots[i], known[i] + offset]` is written.
        offset: place of the draft.
    """
    chosen = torch.nonzero(counts > offset).flatten()
    own = tokens[chosen] if ids is None else ids[tokens[chosen]]
    token_table[slots[chosen], known[chosen] + offset] = own.to(token_table.dtype)
