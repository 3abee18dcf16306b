"""What layers ask of several ranks, against the same on one; ranks are threads."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import ops
from octavo.layers.embedding import LMHead, vocab_range
from octavo.parallel.state import TensorParallelGroup
from tests.parallel.threads import on_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_of_all_columns_is_found(ranks, dtype):
    """Few values, so that there are equals: the first of them counts."""
    logits = torch.randint(-4, 3, (40, 6 * ranks), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0] = -0.0
    logits[1, -1] = float("inf")
    logits[2, 1:] = float("-inf")

    def work(group: TensorParallelGroup) -> torch.Tensor:
        first = 6 * group.rank
        return group.argmax(logits[:, first : first + 6].contiguous(), first)

    for found in on_ranks(ranks, work):
        assert found.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("vocab", [385, 8, 17])  # of 8 the second and third rank have none
def test_a_head_chooses_among_real_tokens(vocab):
    whole = torch.randn(5, vocab, generator=torch.Generator().manual_seed(2)) - 9.0

    def work(group: TensorParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        head = LMHead(vocab, 4)
        head.group = group
        head.rows, head.first, head.real = vocab_range(vocab, group)
        local = torch.zeros(5, head.rows)  # a token that only pads would be the likeliest
        local[:, : head.real] = whole[:, head.first : head.first + head.real]
        return head.argmax(local), head.gather(local)

    for tokens, logits in on_ranks(3, work):
        assert torch.equal(logits, whole)
        assert torch.equal(tokens.long(), whole.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_normalized_with_the_stream(dtype):
    parts, residual = torch.randn(2, 7, 24).to(dtype), torch.randn(7, 24).to(dtype)
    weight = torch.randn(24).to(dtype)
    want = ops.add_rms_norm((parts[0] + parts[1]).to(dtype), residual.clone(), weight, 1e-5)

    def work(group: TensorParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        return group.add_rms_norm(parts[group.rank].clone(), residual.clone(), weight, 1e-5)

    for normed, stream in on_ranks(2, work):
        assert torch.equal(normed, want[0]) and torch.equal(stream, want[1])
