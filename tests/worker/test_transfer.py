"""Tokens' way to the host: where they lie, and for how long."""

import torch

from octavo.worker.transfer import TokenTransfer


def test_two_tensors_of_a_step_lie_apart_and_stay_for_seven_more_steps() -> None:
    """Of sizes that are no multiples of the alignment, up to the most numbers there may be."""
    transfer = TokenTransfer(24, torch.device("cpu"))
    told = []
    for step in range(30):
        tokens = torch.arange(19, dtype=torch.int32) + 100 * step
        counts = torch.full((5,), step, dtype=torch.int32)
        given = [(tokens[:18].view(6, 3), counts), (tokens, None), (None, None)][step % 3]
        places, event = transfer.start(*given)
        assert event is None
        told.append((given, places))
        for earlier, found in told[-8:]:
            for want, got in zip(earlier, found, strict=True):
                assert (want is None) == (got is None)
                assert want is None or (want.shape == got.shape and torch.equal(want, got))
