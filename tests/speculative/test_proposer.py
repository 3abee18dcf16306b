"""Plain decoding is the proposer that proposes nothing."""

import numpy as np
import torch

from octavo.speculative.proposer import NoProposer, ProposeContext


def test_no_proposer_proposes_nothing():
    proposer = NoProposer()
    context = ProposeContext(
        np.zeros(1, np.int32), torch.zeros(1), torch.ones(1), torch.zeros(1, 4, dtype=torch.int32)
    )
    assert proposer.max_drafts == 0
    assert not proposer.needs_hidden
    assert proposer.propose(context) is None
