"""Every bad value is refused with one line that names it; good ones come out normalised."""

import math

import msgspec
import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.sampling_params import MAX_LOGIT_BIAS, RequestOutputKind, SamplingParams

BAD = [
    *[("n", v) for v in (0, -1, 129, 1.5, "2", True, None)],
    *[("temperature", v) for v in (-0.1, math.nan, math.inf, "hot", None, True, 10**400)],
    *[("top_p", v) for v in (0, -0.1, 1.1, math.nan, "x", None)],
    *[("top_k", v) for v in (-2, 1.5, "3", None, True)],
    *[("min_p", v) for v in (-0.1, 1.1, math.nan, None)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan, "a")],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, math.inf, None)],
    *[("repetition_penalty", v) for v in (0, -1, math.nan, math.inf, "a")],
    *[("seed", v) for v in (2**64, -(2**63) - 1, 1.5, "1", True)],
    *[("max_tokens", v) for v in (0, -1, 2.0, "5", True)],
    *[("min_tokens", v) for v in (-1, 17, 1.0, None)],
    *[("logprobs", v) for v in (-2, 1.5, "2")],
    *[("prompt_logprobs", v) for v in (-2, 1.5, "2")],
    *[("stop", v) for v in ("", [""], [1], 5, ["x"] * 65, "x" * 2**20, ["\ud800"], {"a": 1})],
    *[("stop_token_ids", v) for v in ([-1], [1.5], ["1"], [2**40], 5, "12", [True])],
    *[("allowed_token_ids", v) for v in ([], [-1], [2**40], 5, [None])],
    *[("bad_words", v) for v in ("word", [""], [1], ["w"] * 1025, ["\udfff"])],
    *[
        ("logit_bias", v)
        for v in (
            {"a": 1},
            {"1.5": 1},
            {1.5: 1},
            {-1: 1},
            {None: 1},
            {2**40: 1},
            {1: 101},
            {1: math.nan},
            {1: "2"},
            [1],
            dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1),
        )
    ],
    *[
        (name, "yes")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
    ],
    ("spaces_between_special_tokens", None),
    ("output_kind", 7),
    ("structured_outputs", {"json": []}),
]


@pytest.mark.parametrize(
    ("name", "value"), BAD, ids=lambda v: repr(v)[:30].encode("ascii", "replace").decode()
)
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert caught.value.param == name
    assert name in message and "\n" not in message and len(message) < 250
    message.encode()  # printable anywhere: a lone surrogate is shown escaped


def test_all_strings_together_are_bounded():
    """What finds stop strings takes some hundred bytes a character, and bad words are tokenized twice."""
    for name, count, most in (("stop", 5, 1 << 14), ("bad_words", 17, 1 << 16)):
        words = [chr(97 + i) * 4000 for i in range(count)]
        with pytest.raises(RequestError, match=f"{name} has {4000 * count} characters: at most {most}"):
            SamplingParams(**{name: words})
        assert len(getattr(SamplingParams(**{name: words[:-1]}), name)) == count - 1


def test_lists_of_ids_are_bounded_and_the_caller_s_stay_its_own():
    with pytest.raises(RequestError, match="stop_token_ids has 1048577 entries: at most 1048576 are allowed"):
        SamplingParams(stop_token_ids=[1] * ((1 << 20) + 1))
    given = list(range(100_000))
    params = SamplingParams(allowed_token_ids=given)
    assert params.allowed_token_ids == given and params.allowed_token_ids is not given
    with pytest.raises(RequestError, match="allowed_token_ids=True is not valid"):
        SamplingParams(allowed_token_ids=[1, True])


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_good_values_are_normalised():
    p = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        stop="end",
        top_k=-1,
        seed=-1,
        logprobs=True,
        logit_bias={"5": 1, 7: -2.5},
        stop_token_ids=(1, np.int32(2)),
        max_tokens=None,
        min_tokens=100,
    )
    assert (p.n, p.temperature, p.stop, p.top_k, p.seed, p.logprobs) == (2, 0.5, ["end"], 0, None, 1)
    assert p.logit_bias == {5: 1.0, 7: -2.5}
    assert p.stop_token_ids == [1, 2]
    assert not p.greedy and SamplingParams(temperature=0).greedy
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=SamplingParams) == p
    assert SamplingParams(output_kind=1).output_kind is RequestOutputKind.DELTA


def test_bounds_themselves_are_allowed():
    SamplingParams(
        presence_penalty=-2, frequency_penalty=2, top_p=1, min_p=1, repetition_penalty=0.01, top_k=0
    )
    SamplingParams(seed=2**64 - 1, logprobs=-1, prompt_logprobs=0, max_tokens=1, min_tokens=1, n=128)


def test_clone_checks_again_and_leaves_the_original():
    p = SamplingParams(temperature=0.5, stop=["a"])
    assert p.clone(n=3) == SamplingParams(temperature=0.5, stop=["a"], n=3)
    assert p.n == 1
    with pytest.raises(RequestError):
        p.clone(temperature=-1)


@pytest.mark.parametrize(
    ("params", "limit", "name"),
    [
        (dict(stop_token_ids=[100]), -1, "stop_token_ids"),
        (dict(allowed_token_ids=[3, 100]), -1, "allowed_token_ids"),
        (dict(logit_bias={100: 1}), -1, "logit_bias"),
        (dict(logprobs=101), -1, "logprobs"),
        (dict(logprobs=21), 20, "logprobs"),
        (dict(logprobs=-1), 20, "logprobs"),
        (dict(prompt_logprobs=21), 20, "prompt_logprobs"),
    ],
)
def test_what_depends_on_the_model(params, limit, name):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params).check_vocabulary(100, limit)
    assert caught.value.param == name
    SamplingParams(stop_token_ids=[99], logit_bias={0: 1}, logprobs=20, prompt_logprobs=-1).check_vocabulary(
        100
    )
