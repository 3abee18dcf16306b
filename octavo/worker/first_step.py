"""A step that begins requests, made without an engine: to measure what a step takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.kv.format import KVGroup
from octavo.sampling_params import SamplingParams
from octavo.step_messages import Admission, BlockUpdate, StepPlan


def first_step(
    groups: Sequence[KVGroup],
    block_size: int,
    num_rows: np.ndarray,
    params: SamplingParams,
    num_computed: int = 0,
) -> tuple[StepPlan, int]:
    """A step that admits requests and ends their prompts, and how many KV blocks it uses.

    Args:
        groups: the KV groups, in each of which a request has as many blocks.
        block_size: tokens of a block.
        num_rows: int32 `[n]`, rows of each request.
        params: of all.
        num_computed: tokens of each that the cache is taken to hold.
    """
    none = np.zeros(0, np.int32)
    n, tokens = len(num_rows), num_rows + num_computed
    firsts = np.concatenate(([0], np.cumsum(-(-tokens // block_size))))
    plan = StepPlan(
        step_id=0,
        admissions=[
            Admission(
                slot=i,
                token_ids=np.zeros(int(tokens[i]), np.int32),
                prompt_len=int(tokens[i]),
                num_computed=num_computed,
                block_ids=[list(range(int(firsts[i]), int(firsts[i + 1]))) for _ in groups],
                params=params,
                seed=i,
                eos_token_ids=[],
                bad_words_ids=[],
            )
            for i in range(n)
        ],
        block_updates=[BlockUpdate(none, none, none) for _ in groups],
        slots=np.arange(n, dtype=np.int32),
        num_rows=num_rows,
        start=np.full(n, num_computed, np.int32),
        samples=np.ones(n, bool),
    )
    return plan, int(firsts[-1])
