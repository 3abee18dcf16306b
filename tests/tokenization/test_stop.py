"""Stop strings, against a search through the whole text."""

from __future__ import annotations

import codecs
import gc
import weakref

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams
from octavo.tokenization.stop import StopMatcher, TextStream
from octavo.tokenization.tokenizer import Tokenizer


def oracle(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Text, stop string and tokens used, from the texts of all prefixes (complete characters only)."""
    data, texts = b"", [""]
    for token in ids:
        data += tokenizer.byte_table(True)[token]
        texts.append(codecs.getincrementaldecoder("utf-8")("replace").decode(data))
    texts[-1] = data.decode("utf-8", "replace") if ids else ""
    full = texts[-1]
    exempt = len(texts[min(min_tokens, len(ids))]) if min_tokens else 0
    if min_tokens >= len(ids):
        return full, None, len(ids)
    ends = [
        (at + len(stop), at, stop)
        for stop in stops
        for at in range(len(full))
        if full.startswith(stop, at) and at + len(stop) > exempt
    ]
    if not ends:
        return full, None, len(ids)
    end, start, stop = min(ends)
    used = next(i for i, text in enumerate(texts) if len(text) >= end)
    return full[: end if include else start], stop, used


def run(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], params: SamplingParams, late_end: bool = False
) -> tuple[str, str | None, int]:
    """The stream's own answer, with the tokens pushed in groups of `sizes`."""
    stream = TextStream(tokenizer, tokenizer.encode("the prompt"), params)
    cuts, at = [], 0
    for size in sizes:
        cuts.append(ids[at : at + size])
        at += size
    cuts.append(ids[at:])
    if late_end:
        cuts.append([])
    text, used = "", 0
    for index, cut in enumerate(cuts):
        delta = stream.push(cut, finished=index == len(cuts) - 1)
        text += delta.text
        used += delta.num_tokens_used
        assert stream.text == text
        if delta.stop is not None:
            assert stream.push([5, 6]) == ("", delta.stop, 0)
            return text, delta.stop, used
    return text, None, used


WORDS = st.sampled_from(["ab", "a", "b", "aab", "STOP", "ST", "OP", " the", "\n", "\n\n", "😀", "世", "x"])


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.lists(WORDS, max_size=14).map("".join), st.text("ab", max_size=20)),
    st.lists(st.text("abSTOP\n😀世", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=14),
    st.booleans(),
    st.integers(0, 4),
    st.booleans(),
)
@example("aab STOP", ["STO", "TO"], [1, 1, 1], False, 0, False)
def test_every_grouping_equals_the_search(
    smollm2: Tokenizer,
    text: str,
    stops: list[str],
    sizes: list[int],
    include: bool,
    min_tokens: int,
    late_end: bool,
) -> None:
    ids = smollm2.encode(text)
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    assert run(smollm2, ids, sizes, params, late_end) == oracle(smollm2, ids, stops, include, min_tokens)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=16),
    st.lists(st.text('!"#\ufffdé', min_size=1, max_size=2), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=14),
    st.booleans(),
)
def test_bytes_that_are_no_text(
    smollm2: Tokenizer, ids: list[int], stops: list[str], sizes: list[int], include: bool
) -> None:
    """Single bytes in any order, with U+FFFD itself a stop string."""
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    assert run(smollm2, ids, sizes, params) == oracle(smollm2, ids, stops, include, 0)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_holds_back_exactly_what_could_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        new, match = matcher.feed(piece)
        shown += new
        if match is not None:
            return
        held = max(
            n
            for n in range(len(text) + 1)
            if any(s.startswith(text[len(text) - n :]) and n < len(s) for s in stops)
        )
        assert shown == text[: len(text) - held]
    assert shown + matcher.flush() == text


def _push_all(tokenizer: Tokenizer, text: str, **params) -> tuple[list[str], str | None]:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, [1], SamplingParams(**params))
    texts = []
    for index, token in enumerate(ids):
        delta = stream.push([token], finished=index == len(ids) - 1)
        texts.append(delta.text)
        if delta.stop:
            return texts, delta.stop
    return texts, None


def test_stop_starts_inside_a_token_and_spans_several(smollm2: Tokenizer) -> None:
    text = "Hello world, how are you today?"
    assert len(smollm2.encode(text)) > 5
    texts, stop = _push_all(smollm2, text, stop=["orld, how a"])
    assert ("".join(texts), stop) == ("Hello w", "orld, how a")
    texts, stop = _push_all(smollm2, text, stop=["orld, how a"], include_stop_str_in_output=True)
    assert "".join(texts) == "Hello world, how a"


def test_false_start_is_released_and_the_rest_flushed(smollm2: Tokenizer) -> None:
    texts, stop = _push_all(smollm2, "one two three four", stop=[" two four", "four five"])
    assert stop is None and "".join(texts) == "one two three four"
    assert texts[1] == "" and texts[2] == " two three"
    assert texts[-1] == " four"


def test_earliest_completed_wins_then_earliest_started(smollm2: Tokenizer) -> None:
    assert _push_all(smollm2, "a b c d e", stop=["b c d e", "c"])[1] == "c"
    assert _push_all(smollm2, "a b c d e", stop=["c", "b c"])[1] == "b c"


def test_stop_in_the_prompt_does_not_count(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2, smollm2.encode("before STOP"), SamplingParams(stop=["STOP", "P after"]))
    assert stream.push(smollm2.encode(" after"), finished=True) == (" after", None, 1)


def test_end_token_belongs_to_the_choice_but_not_to_its_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("yes no")
    stream = TextStream(smollm2, [1], SamplingParams(stop=["no"]))
    assert stream.push(ids, finished=True, ended_by_token=True) == ("yes", None, 2)
    shown = TextStream(smollm2, [1], SamplingParams(include_stop_str_in_output=True))
    assert shown.push(ids, finished=True, ended_by_token=True).text == "yes no"


def test_without_detokenizing() -> None:
    stream = TextStream(None, [1], SamplingParams(detokenize=False))
    assert stream.push([5, 6, 7], finished=True) == ("", None, 3)
    assert stream.text == ""


def test_choices_of_a_request_share_what_finds_their_stop_strings() -> None:
    """It takes some hundred bytes a character, and a request may have many choices."""
    stops = [chr(97 + i) * 200 for i in range(20)]
    first, second = StopMatcher(stops), StopMatcher(list(stops))
    assert first._automaton is second._automaton
    assert first.feed("x" + "c" * 200 + "y") == second.feed("x" + "c" * 200 + "y") == ("x", (stops[2], 201))
    kept = weakref.ref(first._automaton)
    del first, second
    gc.collect()
    assert kept() is None  # long ones are not kept


@pytest.mark.parametrize("stop", ["a" * 4096, "ab" * 2048, "a" * 4095 + "b"])
def test_the_longest_stop_strings(smollm2: Tokenizer, stop: str) -> None:
    """Text that begins one at every character is neither lost nor shown too early."""
    text = "ab" * 2047 + "xab" + "ab" * 2048 if "ab" in stop[:2] else "a" * 4095 + "x" + "a" * 5000
    texts, found = _push_all(smollm2, text, stop=[stop])
    assert found == (stop if stop in text else None)
    assert "".join(texts) == text.partition(stop)[0]


@pytest.mark.parametrize("detokenize", [True, False])
def test_lengthening_is_pushing_what_ends_nothing(smollm2: Tokenizer, detokenize: bool) -> None:
    ids = smollm2.encode("naïve café 🙂👍🏽, and more")
    params = SamplingParams(detokenize=detokenize)
    pushed, lengthened = (TextStream(smollm2, [], params) for _ in range(2))
    for token in ids[:-1]:
        assert lengthened.lengthen([token]) == pushed.push([token]).text
    assert lengthened.push(ids[-1:], finished=True) == pushed.push(ids[-1:], finished=True)
    assert lengthened.text == pushed.text == (smollm2.decode(ids) if detokenize else "")
