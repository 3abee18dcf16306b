"""The masks of a step: begun while its forward pass runs, where the tokens before are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.engine.grammar_run import GrammarRun
from octavo.step_messages import TokenMasks


def begin_masks(runs: Sequence[GrammarRun]) -> None:
    """Start the masks that need no token of a step in flight, before a step is launched.

    Args:
        runs: those of a step that is planned, whose own tokens are `pending` already.
    """
    for run in runs:
        if run.pending == 1:
            run.begin()


def collect_masks(rows: np.ndarray, runs: Sequence[GrammarRun]) -> TokenMasks:
    """All masks of a step whose predecessors have been taken in. The calling thread helps.

    Args:
        rows: int32 `[m]`, the requests' places in the plan.
        runs: theirs.
    """
    for run in runs[1:]:
        run.begin()
    for run in runs:
        run.wait()
    return TokenMasks(rows, np.concatenate([run.masks for run in runs]))
