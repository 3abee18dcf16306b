"""Triton's sums over GPUs against their plain twins.

One rank's kernel at a time finds in its box what the others would have written; and ranks as processes that
write each other's boxes while they wait, one a moment ahead of the other.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has them on GPUs", allow_module_level=True)

from octavo.kernels import ops, reference_peers
from octavo.kernels.triton import peers
from octavo.kernels.triton.peers import PeerBox

BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WORDS = {2: torch.int16, 4: torch.int32}


def boxes(ranks: int, dtype: torch.dtype, rows: int = 8, row_words: int = 128) -> list[PeerBox]:
    """Every rank's box; all in this process's memory, and that of its children."""
    word = WORDS[dtype.itemsize]
    words = [torch.full((2, ranks, rows, row_words), torch.iinfo(word).min, dtype=word) for _ in range(ranks)]
    addresses = torch.tensor([w.share_memory_().data_ptr() for w in words])
    turns = [torch.zeros(rows, dtype=torch.int32) for _ in range(ranks)]
    return [PeerBox(rank, ranks, words[rank], addresses, turns[rank]) for rank in range(ranks)]


def deliver(box: PeerBox, sender: int, part: torch.Tensor, turn: int) -> None:
    """Write what another rank's kernel would have written."""
    words = part.clone()
    words[words == 0] = 0.0  # no negative zero
    box.words[turn % 2, sender, : part.shape[0], : part.shape[1]] = words.view(box.words.dtype)


def is_empty(words: torch.Tensor) -> bool:
    return bool((words == torch.iinfo(words.dtype).min).all())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    bound = BOUNDS[want.dtype]
    torch.testing.assert_close(got, want, rtol=2 * bound, atol=2 * bound)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize(("ranks", "rows", "size"), [(2, 3, 100), (3, 1, 128), (2, 5, 1), (4, 2, 17)])
def test_each_rank_adds_what_all_sent(dtype, ranks, rows, size):
    """Two kernels after each other, so that both turns are taken; the last two with a norm."""
    every = boxes(ranks, dtype)
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(size, generator=g).to(dtype)
    for turn in range(4):
        parts = [torch.randn(rows, size, generator=g).to(dtype) for _ in range(ranks)]
        for part in parts:
            part[0, 0] = -0.0
        stream = torch.randn(rows, size, generator=g).to(dtype)
        want = reference_peers.sum_over_ranks(parts)
        if turn >= 2:
            want_stream = stream.clone()
            want, _ = reference_peers.sum_add_rms_norm(parts, want_stream, weight, 1e-5)
        results = []
        for rank, box in enumerate(every):
            for other in range(ranks):
                if other != rank:
                    deliver(box, other, parts[other], turn)
            sent = [b.words[turn % 2, rank].clone() for b in every]
            for b in every:
                b.words[turn % 2, rank] = torch.iinfo(b.words.dtype).min
            if turn < 2:
                results.append(peers.sum_over_ranks(parts[rank], box))
            else:
                residual = stream.clone()
                got, same = peers.sum_add_rms_norm(parts[rank], residual, weight, 1e-5, box)
                assert same is residual
                close(residual, want_stream)
                results.append(got)
            assert is_empty(box.words)  # what was read is taken out
            for other, b in enumerate(every):  # the others have got it, and nothing but that
                if other != rank:
                    mine = b.words[turn % 2, rank]
                    assert torch.equal(mine[:rows, :size].view(dtype), parts[rank])
                    assert not (mine[:rows, :size] == torch.iinfo(mine.dtype).min).any()
                    assert is_empty(mine[rows:]) and is_empty(mine[:, size:])
                    mine.copy_(sent[other])
            for b in every:  # the next rank begins with an empty box
                b.words.fill_(torch.iinfo(b.words.dtype).min)
            assert box.turns.tolist() == [turn + 1] * rows + [0] * (box.rows - rows)
        for got in results:
            close(got, want)
            assert torch.equal(got, results[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_best_of_all_ranks_is_chosen(ranks):
    every = boxes(ranks, torch.float32)
    g = torch.Generator().manual_seed(3)
    logits = [torch.randint(-3, 3, (6, 40), generator=g).float() for _ in range(ranks)]
    for part in logits:
        part[0] = -0.0
        part[1] = float("-inf")
    logits[-1][1, 7] = -1e30
    whole = torch.cat(logits, dim=1)
    found = [peers.largest_in_parts(part) for part in logits]
    best = [values.max(1).values for values, _ in found]
    where = [ops.argmax(part).int() + 40 * rank for rank, part in enumerate(logits)]
    for rank, box in enumerate(every):
        for other in range(ranks):
            if other != rank:
                pairs = torch.stack((best[other] + 0.0, where[other].view(torch.float32)), dim=1)
                box.words[0, other, :6, :2] = pairs.view(torch.int32)
        token = peers.best_over_ranks(*found[rank], 40 * rank, box)
        assert token.tolist() == [row.index(max(row)) for row in whole.tolist()]
        assert torch.equal(token.long(), reference_peers.best_over_ranks(best, where).long())
        assert is_empty(box.words)
        for b in every:
            b.words.fill_(torch.iinfo(b.words.dtype).min)


def test_what_does_not_fit_is_refused():
    (box, _) = boxes(2, torch.bfloat16)
    with pytest.raises(ValueError, match="fit"):
        peers.sum_over_ranks(torch.zeros(2, 129).bfloat16(), box)
    with pytest.raises(ValueError, match="fit"):
        peers.sum_over_ranks(torch.zeros(2, 4), box)


ROUNDS = 30


def _work(box: PeerBox, words: PeerBox, seed: int, results: Any) -> None:
    """A rank's process: rounds of all kernels, of changing sizes, with pauses of its own."""
    torch.set_num_threads(1)
    pause = random.Random(seed)
    found = []
    for n in range(ROUNDS):
        parts, stream, weight, logits = _round(n, box.ranks)
        if pause.random() < 0.3:
            time.sleep(pause.random() * 0.02)
        if n % 3 == 0:
            found.append(peers.sum_over_ranks(parts[box.rank], box).float().tolist())
        elif n % 3 == 1:
            normed, stream = peers.sum_add_rms_norm(parts[box.rank], stream, weight, 1e-5, box)
            found.append([normed.float().tolist(), stream.float().tolist()])
        else:
            part = peers.largest_in_parts(logits[box.rank])
            found.append(peers.best_over_ranks(*part, 8 * box.rank, words).tolist())
    results.put((box.rank, found, bool(is_empty(box.words))))


def _round(n: int, ranks: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(n)
    rows, size = 1 + n % 4, 8 + 7 * (n % 5)
    if n % 10 == 3 and n % 3 < 2:
        rows = 21  # three kernels' worth, in the same places
    parts = [torch.randn(rows, size, generator=g).bfloat16() for _ in range(ranks)]
    logits = [torch.randn(rows, 8, generator=g) for _ in range(ranks)]
    return parts, torch.randn(rows, size, generator=g).bfloat16(), torch.ones(size).bfloat16(), logits


@pytest.mark.parametrize(("ranks", "few"), [(2, 32), (2, 1), (3, 3)])
def test_ranks_that_run_by_themselves_keep_in_step(ranks, few, monkeypatch):
    monkeypatch.setattr(peers, "FEW_ROWS", few)
    every, words = boxes(ranks, torch.bfloat16), boxes(ranks, torch.float32)
    fork = multiprocessing.get_context("fork")  # boxes lie at the same addresses in all
    results = fork.Queue()
    processes = [
        fork.Process(target=_work, args=(every[rank], words[rank], rank, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    told = sorted(results.get(timeout=100) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert all(found == told[0][1] for _, found, _ in told)  # the same bits
    assert all(empty for _, _, empty in told)
    for n, got in enumerate(told[0][1]):
        parts, stream, weight, logits = _round(n, ranks)
        if n % 3 == 0:
            close(torch.tensor(got).bfloat16(), reference_peers.sum_over_ranks(parts))
        elif n % 3 == 1:
            want, stream = reference_peers.sum_add_rms_norm(parts, stream, weight, 1e-5)
            close(torch.tensor(got[0]).bfloat16(), want)
            close(torch.tensor(got[1]).bfloat16(), stream)
        else:
            assert got == torch.cat(logits, dim=1).argmax(1).tolist()
