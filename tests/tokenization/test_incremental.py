"""Text as it comes: whole characters, the same sum however tokens are grouped."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams
from octavo.tokenization.incremental import IncrementalDetokenizer
from octavo.tokenization.tokenizer import Tokenizer

PARAMS = SamplingParams()
HARD = [
    "😀",
    "👨‍👩‍👧‍👦",
    "🏳️‍🌈",
    "🇫🇷🇩🇪",
    "👍🏽",
    "你好，世界。龘",
    "안녕",
    "𝔘𝔫𝔦",
    "e\u0301",
    "नमस्ते",
    "é́ x 😀y",
]


def _chunks(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], params: SamplingParams = PARAMS
) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, tokenizer.encode("prompt"), params)
    out, at = [], 0
    for size in sizes:
        out.append(stream.append(ids[at : at + size]))
        at += size
    return [*out, stream.append(ids[at:]), stream.finish()]


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("which", ["smollm2", "spm"])
def test_no_half_character_wherever_it_is_cut(which: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(which)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(len(ids) + 1):
        kept = ids[:cut]
        chunks = _chunks(tokenizer, kept, [1] * cut)
        # Only the last flush, of a character that max_tokens cut, may hold U+FFFD.
        assert not any("\ufffd" in chunk for chunk in chunks[:-1])
        whole = "".join(chunks)
        assert whole == b"".join(map(tokenizer.token_to_bytes, kept)).decode("utf-8", "replace")
        assert ("\ufffd" in chunks[-1]) == (whole.encode() != b"".join(map(tokenizer.token_to_bytes, kept)))
    assert "".join(_chunks(tokenizer, ids, [])).removeprefix(" ") == text


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 49160), max_size=30), st.lists(st.integers(0, 4), max_size=12), st.booleans())
def test_any_tokens_in_any_grouping_equal_decode(
    smollm2: Tokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    whole = smollm2.decode(ids, skip_special_tokens=skip)
    assert "".join(_chunks(smollm2, ids, sizes, params)) == whole


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 360), max_size=20), st.lists(st.integers(0, 4), max_size=12), st.booleans())
@example([3 + 0x20, 3 + 0x20, 3 + 0x61], [1, 1, 1], True)
def test_sentencepiece_is_the_continuation_of_its_prompt(
    spm: Tokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    prompt = spm.encode("hello")
    whole = spm.decode([*prompt, *ids], skip_special_tokens=skip)
    assert (
        "".join(_chunks(spm, ids, sizes, params))
        == whole[len(spm.decode(prompt, skip_special_tokens=skip)) :]
    )
    # With no text before it, the text has a start, and the space of the first word goes.
    stream = IncrementalDetokenizer(spm, [1], SamplingParams(skip_special_tokens=True))
    chunks = [stream.append([i]) for i in ids]
    assert "".join([*chunks, stream.finish()]) == spm.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_sentencepiece_decodes_valid_text_as_the_library(spm: Tokenizer, text: str) -> None:
    ids = spm.encode(text)
    assert spm.decode(ids) == spm._backend.decode(ids, skip_special_tokens=True)


def test_special_tokens_and_rows_beyond_the_vocabulary(smollm2: Tokenizer) -> None:
    ids = [1, *smollm2.encode("hi 😀"), 2, 49152, 60000]
    assert "".join(_chunks(smollm2, ids, [1] * 9)) == "hi 😀"
    shown = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=True)
    assert "".join(_chunks(smollm2, [1, 1, 2], [1, 1], shown)) == "<|im_start|><|im_start|><|im_end|>"


def test_a_skipped_token_inside_a_character_does_not_break_it(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("龘")
    assert len(ids) > 1
    ids.insert(1, 2)
    assert "".join(_chunks(smollm2, ids, [1] * len(ids))) == "龘" == smollm2.decode(ids)
