"""Masks against what they must allow, with a real tokenizer; what is refused, and within which time."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

from octavo.engine.grammar_run import GrammarRun
from octavo.errors import RequestError
from octavo.sampling.structured.backend import Grammar, GrammarState, Vocabulary
from octavo.sampling.structured.json_runs import MAX_RUN
from octavo.sampling.structured.llguidance_backend import LLGuidanceBackend
from octavo.structured_outputs import StructuredOutputsParams
from octavo.tokenization.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return load_tokenizer(default_model)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    table = tokenizer.byte_table(False)
    return Vocabulary(
        # A model's vocabulary may be larger than its tokenizer's, and no multiple of 32.
        tokens=[table[i] for i in range(tokenizer.vocab_size)] + [b""] * 7,
        special_ids=tokenizer.all_special_ids,
        eos_ids=list(tokenizer.eos_token_ids),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


@pytest.fixture(scope="module")
def backend(vocabulary):
    return LLGuidanceBackend(vocabulary)


def allowed(state: GrammarState, size: int) -> set[int]:
    row = np.full(-(-size // 32), -1, np.int32)  # what is left unwritten would allow everything
    state.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:size]).tolist())


def takes(grammar: Grammar, ids: list[int], vocabulary: Vocabulary) -> bool:
    """Whether exactly this text may be produced, by its masks."""
    state = grammar.new_state()
    for token in ids:
        if state.is_terminated or token not in allowed(state, len(vocabulary.tokens)):
            return False
        assert state.accept([token]) == 1
    return state.is_terminated or vocabulary.eos_ids[0] in allowed(state, len(vocabulary.tokens))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<f=go>", "schema": PERSON, "end": "</f>"}],
    "triggers": ["<f="],
}
CHOICES = ["yes", "yes, sir", 'no "quotes" \\ é']
FORMS = [
    (
        dict(json=PERSON),
        ['{"name": "Ann", "age": 7}', '{"name":"日本","age":150,"tags":["a","b"]}',
         '{\n  "name": "",\n "age": 0\n}'],
        ['{"name": "Ann"}', '{"name": "Ann", "age": 151}', '{"name": "much too long", "age": 1}', "[]",
         '{"age"', '{"name": "A", "age": 1, "x": 2}', '{"name": "A", "age": 1, "tags": ["c"]}'],
    ),
    (dict(json=json.dumps({"type": "array", "items": {"$ref": "#"}})), ["[[], [[]]]"], ["[1]", "[[]"]),
    (dict(json={"type": "string", "format": "of-our-own"}), ['"anything"'], ["1"]),
    (dict(json={"type": "string", "format": "date"}), ['"2024-02-29"'], ['"2024-13-01"', '"soon"']),
    (dict(json_object=True), ['{"a": [1, 2.5e3, null]}', "{}"], ["[]", "1", '{"a": 01}']),
    (dict(json_object=True, disable_any_whitespace=True), ['{"a":1}'], ['{"a": 1}', "{ }"]),
    (dict(json_object=True, whitespace_pattern=" "), ['{ "a": 1}'], ['{\n"a": 1}']),
    (dict(regex=r"[0-9]{3}-[a-f]+"), ["123-abc"], ["12-abc", "123-", "123-xyz"]),
    (dict(choice=CHOICES), CHOICES, ["ye", "y", "no"]),
    (dict(grammar='root ::= "a" ("b" | "c")* "d"'), ["ad", "abcbd"], ["a", "abx"]),
    (dict(grammar='start: "sum " num ("+" num)*\nnum: /[0-9]{1,2}/'), ["sum 1+22+3"], ["sum ", "sum 123"]),
    (dict(structural_tag=TAG), ["plain", 'so <f=go>{"name":"A","age":1}</f> ok'], ['<f=go>{"name":1}</f>']),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "good", "bad"), FORMS, ids=[next(iter(form)) + str(i) for i, (form, _, _) in enumerate(FORMS)]
)
def test_forms(backend, vocabulary, form, good, bad):
    grammar = backend.compile(StructuredOutputsParams(**form))
    for text in good:
        assert takes(grammar, vocabulary.encode(text), vocabulary), text
    for text in bad:
        assert not takes(grammar, vocabulary.encode(text), vocabulary), text


@pytest.mark.parametrize("place", range(len(FORMS)))
def test_forms_after_reasoning(backend, vocabulary, place):
    """Every form begins after the mark, whatever stands before it; the mark may be a special token."""
    form, good, bad = FORMS[place]
    special = "<file_sep>"  # of this vocabulary: no reasoning mark, but one token that no text matches
    for start, end in ((None, "</think>"), ("<think>", "</think>"), (None, special)):
        params = StructuredOutputsParams(**form, reasoning_end=end, reasoning_start=start)
        grammar = backend.compile(params)
        thought = (start or "") + "\nHm, {é\n" + end + "\n\n"
        for text in good:
            text = text.lstrip("\n")
            assert takes(grammar, vocabulary.encode(thought + text), vocabulary), (end, text)
            alone = takes(grammar, vocabulary.encode(text), vocabulary)
            assert alone == (start is not None), "without reasoning only where the start's absence says so"
        for text in bad:
            assert not takes(grammar, vocabulary.encode(thought + text), vocabulary), (end, text)


def test_reasoning_start_needs_an_end():
    with pytest.raises(RequestError, match="reasoning_end"):
        StructuredOutputsParams(json_object=True, reasoning_start="<think>")
    with pytest.raises(RequestError, match="reasoning_end"):
        StructuredOutputsParams(json_object=True, reasoning_end="")


def test_masks_say_what_would_be_accepted(backend, vocabulary):
    """Along random walks: tokens of the mask are accepted, others are not, and going back changes nothing."""
    draw = random.Random(3)
    size = len(vocabulary.tokens)
    for form in (dict(json=PERSON), dict(regex="(ab|a|é)+c"), dict(json_object=True)):
        grammar = backend.compile(StructuredOutputsParams(**form))
        first = np.array(grammar.first_mask)
        state, masks = grammar.new_state(), []
        for _ in range(25):
            mask = allowed(state, size)
            masks.append(mask)
            assert mask, "no token is left"
            assert not any(vocabulary.tokens[t] == b"" for t in mask - set(vocabulary.eos_ids))
            assert not mask & (set(vocabulary.special_ids) - set(vocabulary.eos_ids))
            for token in draw.sample(range(size), 30):
                probe = state.accept([token])
                assert probe == (token in mask), vocabulary.tokens[token]
                state.rollback(probe)
            tokens = sorted(mask - set(vocabulary.eos_ids)) or sorted(mask)
            assert state.accept([draw.choice(tokens)]) == 1
            if state.is_terminated:
                break
        back = draw.randint(1, len(masks))
        state.rollback(back)
        assert allowed(state, size) == masks[-back]
        assert (grammar.first_mask == first).all()


def test_a_part_of_many_tokens_is_accepted(backend, vocabulary):
    grammar = backend.compile(StructuredOutputsParams(choice=["abc"]))
    state = grammar.new_state()
    ids = [vocabulary.tokens.index(c) for c in (b"a", b"b", b"x")]
    assert state.accept(ids) == 2
    assert {vocabulary.tokens[t] for t in allowed(state, len(vocabulary.tokens))} == {b"c"}


@pytest.mark.parametrize("kind", ["space", "digit"])
def test_nothing_is_endless_between_tokens(backend, vocabulary, kind):
    """One that always goes on with white space, or with digits, gets to the end all the same."""
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    state = backend.compile(StructuredOutputsParams(json=schema)).new_state()
    wanted = b" \n\t" if kind == "space" else b"0123456789"
    text = b""
    for _ in range(40 * MAX_RUN):
        options = sorted(allowed(state, len(vocabulary.tokens)) - set(vocabulary.eos_ids))
        if not options:
            break
        runs = [t for t in options if all(byte in wanted for byte in vocabulary.tokens[t])]
        others = [t for t in options if t not in runs]
        token = min(runs or others, key=lambda t: (len(vocabulary.tokens[t]), t))
        assert state.accept([token]) == 1
        text += vocabulary.tokens[token]
        if state.is_terminated:
            break
    assert state.is_terminated, text[-200:]
    assert set(json.loads(text)) == {"a"}
    assert len(text) > MAX_RUN


def test_white_space_in_strings_is_free(backend, vocabulary):
    grammar = backend.compile(StructuredOutputsParams(json={"type": "string"}))
    ids = vocabulary.encode('"' + " " * 5) + vocabulary.encode("  ") * (2 * MAX_RUN) + vocabulary.encode('7"')
    assert takes(grammar, ids, vocabulary)


def test_without_end_tokens(vocabulary):
    """A model without them ends where the form does; the masks have its size."""
    tokens = vocabulary.tokens[:320]
    none = Vocabulary(tokens, [], [], vocabulary.encode)
    state = LLGuidanceBackend(none).compile(StructuredOutputsParams(regex="a+b?")).new_state()
    assert state.accept([tokens.index(b"a")]) == 1
    row = np.zeros(none.num_words, np.int32)
    state.fill_mask(row)
    assert not state.is_terminated
    assert state.accept([tokens.index(b"b")]) == 1
    assert state.is_terminated


DEEP = {"type": "object"}
for _ in range(45):
    DEEP = {"anyOf": [DEEP]}
REFUSED = [
    (dict(regex="(a"), "unclosed group"),
    (dict(regex="(?=a)b"), "look-around"),
    (dict(regex="(" * 3000 + "a" + ")" * 3000), "regex"),
    (dict(regex="a{0}"), "no text"),
    (dict(json={"type": "text"}), "Invalid type"),
    (dict(json={"not": {"type": "string"}}), "not"),
    (dict(json={"properties": {"a/b": {"items": {"not": {"type": "string"}}}}}),
     "not at #/properties/a~1b/items is not supported: say what may stand there"),
    (dict(json={"$defs": {"free": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
                          "both": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}},
                "anyOf": [{"$ref": "#/$defs/free"}, {"$ref": "#/$defs/both"}]}),
     "oneOf at #/$defs/both has branches that may hold together: write anyOf, or give each branch"),
    (dict(json={"type": "array", "uniqueItems": True}), "uniqueItems at # is not supported: leave it out"),
    (dict(json={"if": {"required": ["a"]}, "then": {"required": ["b"]}}), "write anyOf of the cases"),
    (dict(json={"properties": {"a": {"type": "string", "format": "iri"}}}),
     "format 'iri' at #/properties/a is not supported: write a pattern"),
    (dict(json={"properties": {"a": {"type": "string", "pattern": "^(?=a)b"}}}),
     "pattern at #/properties/a looks around"),
    (dict(json={"$ref": "#"}), "no text"),
    (dict(json={"$ref": "http://localhost/x"}), "localhost"),
    (dict(json={"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    (dict(json={"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"minLength": 1}}} for j in "ab"]}
                          for i in range(14)]}), "too large"),
    (dict(json={"type": "string", "format": "iri"}), "iri"),
    (dict(grammar="root ::= "), "no text"),
    (dict(grammar="root ::= (((\n"), "GBNF"),
    (dict(grammar="start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    (dict(grammar='start: missing'), "missing"),
    (dict(structural_tag=TAG | {"triggers": ["<b"]}), "trigger"),
    (dict(structural_tag={"type": "structural_tag", "format": {}}), "structures"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "told"), REFUSED, ids=[f"{next(iter(f))}-{t}" for f, t in REFUSED])
def test_refusals_say_why(backend, form, told):
    begin = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        backend.compile(StructuredOutputsParams(**form))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert caught.value.param == "structured_outputs"
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    "form",
    [
        dict(json={"$defs": {**{f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)},
                             "a30": {"type": "object"}}, "$ref": "#/$defs/a0"}),
        dict(json={"type": "array", "minItems": 100_000, "items": {"type": "string"}}),
        dict(json={"type": "string", "minLength": 1_000_000}),
        dict(json={"enum": [f"value {i}" for i in range(5000)]}),
        dict(json=DEEP),
        dict(regex="(x+x+)+y" * 50),
        dict(choice=[f"choice {i}" for i in range(5000)]),
    ],
    ids=["doubling", "minItems", "minLength", "enum", "deep", "backtracking", "choices"],
)  # fmt: skip
def test_large_forms_are_quick(backend, form):
    begin = time.perf_counter()
    grammar = backend.compile(StructuredOutputsParams(**form))
    assert grammar.first_mask.any()
    assert time.perf_counter() - begin < 10


HARD = {
    "many optional properties": dict(
        json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    ),
    "doubling": dict(
        grammar="\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"\nstart: r0'
    ),
    "many rules": dict(
        grammar="start: "
        + " | ".join(f"r{i}" for i in range(5000))
        + "\n"
        + "\n".join(f'r{i}: "x{i}"' for i in range(5000))
    ),
}


@pytest.mark.parametrize("what", HARD)
def test_a_form_that_grows_too_hard_is_said_to_be_so(backend, vocabulary, what):
    """The library finds out as it takes a token in; the token, which its mask allows, is not to blame."""
    run = GrammarRun(backend.compile(StructuredOutputsParams(**HARD[what])), pool=None)
    draw, size = random.Random(0), len(vocabulary.tokens)
    for _ in range(40):
        bits = np.unpackbits(np.ascontiguousarray(run.masks[0]).view(np.uint8), bitorder="little")
        token = draw.choice(np.flatnonzero(bits[:size]).tolist())
        if not run.accept(token):
            assert run.error is not None and run.error.startswith("the form is too hard to follow")
            assert run.allowed([token]) == 0
            return
        if run.is_terminated:
            return
        run.wait()
        if run.error is not None:
            assert run.error.startswith("the form is too hard to follow")
            return


def test_a_token_that_other_settings_forced_is_to_blame(backend, vocabulary):
    run = GrammarRun(backend.compile(StructuredOutputsParams(regex="[0-9]{3}")), pool=None)
    wrong = next(i for i, text in enumerate(vocabulary.tokens) if text == b"a")
    assert run.allowed([wrong]) == 0 and run.error is None
    assert not run.accept(wrong)
    assert run.error is not None and "loosen allowed_token_ids" in run.error
