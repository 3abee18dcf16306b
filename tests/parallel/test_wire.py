"""Plans and results come out of the wire as they went in."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from octavo.parallel import wire
from octavo.sampling_params import SamplingParams
from octavo.step_messages import (
    Admission,
    BlockCopies,
    BlockUpdate,
    DraftOrder,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def check_equal(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape and np.array_equal(got, want)
        assert got.flags.writeable
    elif dataclasses.is_dataclass(want):
        for spec in dataclasses.fields(want):
            check_equal(getattr(got, spec.name), getattr(want, spec.name))
    elif isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            check_equal(one, other)
    else:
        assert got == want


PLAN = StepPlan(
    step_id=7,
    admissions=[
        Admission(
            slot=3,
            token_ids=ints(5, 6, 7),
            prompt_len=2,
            num_computed=1,
            block_ids=[[0, 4], [-1, 2]],
            params=SamplingParams(temperature=0.5, logit_bias={3: 1.5}, allowed_token_ids=[1, 2], logprobs=2),
            seed=2**64 - 1,
            eos_token_ids=[2],
            bad_words_ids=[[8, 9]],
        )
    ],
    block_updates=[BlockUpdate(ints(0), ints(1), ints(2)), BlockUpdate(ints(), ints(), ints())],
    slots=ints(3, 0),
    num_rows=ints(2, 1),
    start=ints(1, 9),
    samples=np.array([True, False]),
    prompt_logprobs=ints(-1, 4),
    shared_blocks=2,
    copies=[BlockCopies(5, ints(1), ints(2), ints(), ints(), urgent=True)],
    masked=ints(1),
    num_drafts=ints(0, 2),
    draft_tokens=ints(11, 12),
    propose=DraftOrder(ints(1, 1), [BlockUpdate(ints(), ints(), ints())], 3, np.array([True, True])),
    in_doubt=ints(0, 1),
)


def test_a_plan_comes_out_as_it_went_in():
    told = wire.decode_to_rank(wire.encode(wire.RunStep(4, PLAN)))
    assert told.number == 4
    check_equal(told.plan, PLAN)


def test_masks_and_results_come_out_as_they_went_in():
    masks = TokenMasks(ints(0, 2), np.arange(24, dtype=np.int32).reshape(2, 12)[:, ::2])
    check_equal(wire.decode_to_rank(wire.encode(wire.DrawTokens(1, masks))).masks, masks)
    logprobs = [[TokenLogprobs([1], [-0.5], 1)], None]
    result = StepResult(ints(1, 2)[:, None], ints(1, 0), logprobs, None, [b"ab", None], [1], [2], 0.5)
    check_equal(wire.decode_from_rank(wire.encode(wire.StepDone(2, 9, result))).result, result)


def test_other_objects_are_no_part_of_a_message():
    with pytest.raises(NotImplementedError, match="object is no part of a message"):
        wire.encode(wire.RunStep(0, dataclasses.replace(PLAN, masked=object())))
