"""Faults that users of other engines met with speculation, on the default model in float32."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from octavo.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = dict(
    dtype="float32", quantization="none", device="cpu", max_model_len=1024, kv_cache_memory_bytes=1 << 30,
    max_num_seqs=64, check_invariants=True,
)  # fmt: skip
METHODS = ["ngram", "suffix"]

TOPICS = [
    "the sea",
    "bread",
    "a railway station",
    "rain in October",
    "chess",
    "volcanoes",
    "a lost key",
    "bees",
]
FORMS = ["Write a story about {}.", "Explain {} to a child.", "List facts about {}.", "A poem about {}:\n"]


def repetitive_prompts() -> list[str]:
    """Texts that invite copying: code with a pattern, records, lists, texts to be repeated."""
    rng = random.Random(0)
    prompts = []
    for i in range(6):
        names = rng.sample(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"], 4)
        code = "\n".join(f"def get_{n}(self):\n    return self._values['{n}'][{i}]\n" for n in names)
        prompts.append(f"Repeat this code exactly:\n{code}\nAgain:\n{code}\nAgain:\n")
        rows = "\n".join(json.dumps({"id": j, "name": rng.choice(names), "ok": True}) for j in range(6))
        prompts.append(f"{rows}\n")
        prompts.append(f"{', '.join(names)}. " * 8)
    return prompts


def prompts() -> list[str]:
    """Fifty, of which 18 are repetitive."""
    others = [form.format(topic) for form in FORMS for topic in TOPICS]
    return repetitive_prompts() + others


def run(
    default_model: Any, texts: list[str], params: Any, method: str | None = None, most: int = 5
) -> tuple[list[RequestOutput], Any]:
    """Answers, and the engine's statistics."""
    config = method and {"method": method, "num_speculative_tokens": most, "adaptive": False}
    with LLM(str(default_model), **SETTINGS, speculative_config=config or None) as llm:
        outputs = llm.generate(texts, params, use_tqdm=False)
        return outputs, llm.stats()


def check_drafted(stats: Any) -> None:
    """Some drafts stood and some did not."""
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


GREEDY = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)


@pytest.fixture(scope="module")
def plain_greedy(default_model) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in run(default_model, prompts(), GREEDY)[0]]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_outputs_of_fifty_prompts_are_unchanged(method: str, default_model, plain_greedy):
    texts = prompts()
    assert len(texts) == 50
    outputs, stats = run(default_model, texts, GREEDY, method)
    for text, output, want in zip(texts, outputs, plain_greedy, strict=True):
        assert output.outputs[0].token_ids == want, text
    check_drafted(stats)


PENALTIES = [
    *(dict(frequency_penalty=value) for value in (-2.0, 0.0, 2.0)),
    dict(presence_penalty=2.0),
    dict(repetition_penalty=1.3),
    dict(min_tokens=60),
]


@pytest.fixture(scope="module")
def plain_penalties(default_model) -> list[RequestOutput]:
    return run(default_model, *penalties())[0]


def penalties() -> tuple[list[str], list[SamplingParams]]:
    """Requests with penalties, log-probabilities too."""
    texts = ["one two three four. " * 6, repetitive_prompts()[0]]
    params = [SamplingParams(temperature=0.0, max_tokens=80, logprobs=2, **given) for given in PENALTIES]
    return [text for text in texts for _ in params], params * len(texts)


@pytest.mark.parametrize("method", METHODS)
def test_penalties_and_log_probabilities_are_those_of_plain_decoding(
    method: str, default_model, plain_penalties
):
    outputs, stats = run(default_model, *penalties(), method)
    check_drafted(stats)
    for output, want in zip(outputs, plain_penalties, strict=True):
        choice, other = output.outputs[0], want.outputs[0]
        assert choice.token_ids == other.token_ids
        assert len(choice.logprobs) == len(choice.token_ids)
        for entry, reference in zip(choice.logprobs, other.logprobs, strict=True):
            assert entry.keys() == reference.keys()
            assert all(abs(entry[t].logprob - reference[t].logprob) < 1e-3 for t in entry)
        assert any(lp.logprob < -1e-3 for entry in choice.logprobs for lp in entry.values())
    assert len({tuple(o.outputs[0].token_ids) for o in outputs[: len(PENALTIES)]}) > 2


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema, whose answers are short."""
    kinds = ["string", "integer", "boolean", "enum", "pattern"] + ["object", "array"] * (depth < 2)
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 12)}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", "blue", 1, 2.5, None, True, "a b"], rng.randint(1, 5))}
    if kind == "pattern":
        return {"type": "string", "pattern": f"^[A-Z]{{{rng.randint(1, 3)}}}-[0-9]{{{rng.randint(1, 4)}}}$"}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "boolean":
        return {"type": "boolean"}
    names = rng.sample(["name", "id", "tags", "colour", "size", "owner", "valid", "notes"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth + 1) for name in names},
        "required": names[: rng.randint(1, len(names))],
        "additionalProperties": False,
    }


def follows(value: Any, form: dict[str, Any]) -> bool:
    """Whether a value is one of a schema of the kind above, by JSON Schema's definitions."""
    import re

    if "enum" in form:
        return any(type(value) is type(x) and value == x for x in form["enum"])
    kind = form["type"]
    if kind == "string":
        return (
            isinstance(value, str)
            and len(value) <= form.get("maxLength", len(value))
            and re.search(form.get("pattern", ""), value) is not None
        )
    if kind == "integer":
        return type(value) is int and form["minimum"] <= value <= form["maximum"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "array":
        return (
            isinstance(value, list)
            and form["minItems"] <= len(value) <= form["maxItems"]
            and all(follows(x, form["items"]) for x in value)
        )
    return (
        isinstance(value, dict)
        and set(form["required"]) <= value.keys() <= form["properties"].keys()
        and all(follows(x, form["properties"][name]) for name, x in value.items())
    )


@functools.cache
def forms() -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [schema(rng) for _ in range(100)]


@pytest.fixture(scope="module")
def plain_forms(default_model) -> list[RequestOutput]:
    return run(default_model, *form_requests())[0]


def form_requests() -> tuple[list[str], list[SamplingParams]]:
    """A request for each schema."""
    texts = [f"JSON by this schema: {json.dumps(form)}\nFor example: " for form in forms()]
    return texts, [
        SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=StructuredOutputsParams(json=form))
        for form in forms()
    ]


@pytest.mark.parametrize("method", METHODS)
def test_a_hundred_schemas_with_eight_drafts(method: str, default_model, plain_forms):
    outputs, stats = run(default_model, *form_requests(), method, most=8)
    check_drafted(stats)
    finished = 0
    for form, output, want in zip(forms(), outputs, plain_forms, strict=True):
        choice, other = output.outputs[0], want.outputs[0]
        assert choice.token_ids == other.token_ids and choice.finish_reason == other.finish_reason
        if choice.finish_reason == "stop":
            finished += 1
            assert follows(json.loads(choice.text), form), (form, choice.text)
    assert finished >= 80
