"""Random engines and requests: with drafts every answer is what a plain engine with room for all says.

Each seed draws a model, a method and settings that make things difficult (small budgets and caches, chunks,
preemption, swap, overlapping steps, 8-bit caches), and requests that ask for anything that requests can ask.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.structured_outputs import StructuredOutputsParams
from tests import tiny
from tests.engine.speculative_methods import METHODS, config
from tests.engine.test_llm_parity import make

OTHERS = ["gemma3", "qwen3", "mixtral"]  # windows, norms of q and k, experts
FORMS: list[dict[str, Any]] = [
    dict(regex=r"[a-e]{3}-\d{4}( x){2,9}"),
    dict(regex=r"(ab|cd){1,20}"),
    dict(choice=["positive", "negative", "neither of the two"]),
    dict(grammar='start: "x" ("+" "x")* ";"'),
    dict(json={"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
         "b": {"type": "array", "items": {"enum": ["p", "q"]}, "maxItems": 3}}, "required": ["a", "b"],
         "additionalProperties": False}),
]  # fmt: skip
TOKENS = range(len(tiny.SPECIAL_TOKENS), tiny.VOCAB_SIZE)


def draw_engine(draw: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A model, settings that decide what it answers, and those that do not, drafts among them."""
    variant, method = "llama", draw.choice(METHODS)
    most, overlap = draw.randint(1, 8), draw.random() < 0.4
    fields: dict[str, Any] = dict(adaptive=draw.random() < 0.3)
    if method in ("draft_model", "eagle3") and not overlap and draw.random() < 0.4:
        fields["draft_confidence_threshold"] = draw.choice([0.0, 0.1, 0.4])
    if method == "draft_model" and draw.random() < 0.3:
        fields["max_model_len"] = draw.randint(20, 120)
    if method in ("ngram", "suffix", "draft_model") and draw.random() < 0.4:
        variant = draw.choice(OTHERS)
    drafts = config(method, most, **fields)
    if variant != "llama" and method == "draft_model":  # itself, or one that knows nothing of it
        drafts["model"] = str(tiny.checkpoint(draw.choice([variant, "llama"])))
    answer = dict(
        max_model_len=draw.choice([tiny.CONTEXT, 150]),
        kv_cache_dtype=draw.choice(["auto"] * 5 + ["fp8", "int8"]),
        skip_tokenizer_init=False,
    )
    caching = draw.random() < 0.7
    rest: dict[str, Any] = dict(
        speculative_config=drafts,
        async_scheduling=overlap,
        block_size=draw.choice([8, 16]),
        max_num_seqs=draw.choice([1, 2, 4, 16]),
        max_num_batched_tokens=draw.choice([1, 2, 5, 9, 33, 256]),
        long_prefill_token_threshold=draw.choice([0, 0, 0, 3]),
        enable_prefix_caching=caching,
        look_ahead_admission=draw.random() < 0.4,
        enforce_eager=draw.random() < 0.3,
        kv_cache_memory_bytes=draw.choice([250, 280, 350, 8192]) << 10,
    )
    if draw.random() < 0.25:
        rest["swap_space"] = 0.01
    if draw.random() < 0.15:
        rest["attention_backend"] = "torch"
    return variant, answer, rest


def draw_prompt(draw: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    """Tokens of which some repeat, or that others begin with, too."""
    kind, length = draw.random(), draw.randint(1, longest)
    if kind < 0.4:
        return draw.choice(stems)[:length]
    if kind < 0.7:
        return (draw.choices(TOKENS, k=draw.randint(1, 9)) * length)[:length]
    return draw.choices(TOKENS, k=length)


def draw_params(draw: random.Random, room: int) -> SamplingParams:
    """Anything that a request can ask, as long as chance is seeded and a token is left."""
    most = draw.randint(1, min(room, 40))
    fields: dict[str, Any] = dict(max_tokens=None if room < 40 and draw.random() < 0.3 else most)

    def maybe(share: float, name: str, value: Any) -> None:
        if draw.random() < share:
            fields[name] = value

    fields["temperature"] = draw.choice([0.0, 0.0, 0.4, 0.9, 1.4])
    fields["seed"] = draw.randrange(1 << 40)
    maybe(0.2, "top_p", draw.choice([0.3, 0.8, 0.95]))
    maybe(0.2, "top_k", draw.choice([1, 5, 50]))
    maybe(0.15, "min_p", draw.choice([0.02, 0.2]))
    maybe(0.2, "frequency_penalty", draw.choice([-2.0, -0.5, 0.7, 2.0]))
    maybe(0.2, "presence_penalty", draw.choice([-1.0, 0.5, 2.0]))
    maybe(0.2, "repetition_penalty", draw.choice([0.7, 1.3]))
    maybe(0.15, "n", draw.randint(2, 3))
    maybe(0.3, "logprobs", draw.choice([0, 2, 5, 20]))
    maybe(0.1, "prompt_logprobs", draw.choice([0, 2]))
    maybe(0.5, "ignore_eos", True)
    maybe(0.2, "stop", draw.sample(["e", " a", "th", "1", "of", "n of", "x x"], 3))
    maybe(0.3, "include_stop_str_in_output", True)
    maybe(0.25, "logit_bias", {t: draw.uniform(-9, 9) for t in draw.sample(TOKENS, 5)})
    if draw.random() < 0.2:
        return SamplingParams(
            **fields, structured_outputs=StructuredOutputsParams(**draw.choice(FORMS))
        )  # below it, nothing that might forbid what the form asks for
    maybe(0.3, "allowed_token_ids", draw.sample(TOKENS, draw.randint(3, 12)))
    maybe(0.25, "stop_token_ids", draw.sample(TOKENS, 25))
    maybe(0.3, "min_tokens", draw.randint(0, most))
    if "allowed_token_ids" in fields:
        stops = set(fields.get("stop_token_ids", ()))
        if stops >= set(fields["allowed_token_ids"]):
            del fields["stop_token_ids"]
    else:
        maybe(0.2, "bad_words", draw.sample(["the", "a", "e", "1 2", "of paper", " is"], 3))
    return SamplingParams(**fields)


def check_mix(seed: int) -> tuple[Any, str]:
    """Ask both engines; the drafting one's figures and its method."""
    draw = random.Random(seed)
    variant, answer, rest = draw_engine(draw)
    stems = [draw.choices(TOKENS, k=110) for _ in range(2)]
    longest = min(110, answer["max_model_len"] - 1)
    prompts = [draw_prompt(draw, stems, longest) for _ in range(draw.choice([3, 8, 14]))]
    params = [draw_params(draw, answer["max_model_len"] - len(p)) for p in prompts]
    with make(variant, max_num_seqs=64, max_num_batched_tokens=2048, **answer) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    eight_bits, differ = answer["kv_cache_dtype"] != "auto", 0
    with make(variant, **{**answer, **rest}) as llm:
        for _ in range(2):  # then with what the prefix cache holds
            for output, want in zip(llm.generate(prompts, params, use_tqdm=False), plain, strict=True):
                differ += check_output(output, want, 0.1 if eight_bits else 1e-3)
        if not eight_bits:
            check_stream(llm, prompts[0], params[0], plain[0])
        llm.generate([[9]], SamplingParams(max_tokens=1), use_tqdm=False)  # ends of streams are taken in, too
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.draft_blocks) == (
            0,
            0,
            0,
            0,
        )
    # A rounding may make another code of 8 bits, and that another token where two are all but equally likely.
    choices = 2 * sum(len(output.outputs) for output in plain)
    assert differ <= (0.1 * choices if eight_bits else 0), f"{differ} of {choices} answers differ"
    return stats, rest["speculative_config"]["method"]


def check_output(output: RequestOutput, want: RequestOutput, tolerance: float) -> int:
    """Compare one request's answers; how many have other tokens."""
    differ = 0
    assert output.prompt_token_ids == want.prompt_token_ids
    assert (output.prompt_logprobs is None) == (want.prompt_logprobs is None)
    if want.prompt_logprobs is not None and tolerance < 0.01:
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        check_logprobs(output.prompt_logprobs[1:], want.prompt_logprobs[1:], tolerance)
    for choice, other in zip(output.outputs, want.outputs, strict=True):
        if choice.token_ids != other.token_ids:
            differ += 1
            continue
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (
            other.text, other.finish_reason, other.stop_reason
        )  # fmt: skip
        check_choice(choice, other, tolerance)
    return differ


def check_choice(choice: CompletionOutput, other: CompletionOutput, tolerance: float) -> None:
    """The same log-probabilities, one entry a token."""
    assert (choice.logprobs is None) == (other.logprobs is None)
    if choice.logprobs is None or other.logprobs is None:
        return
    assert len(choice.logprobs) == len(choice.token_ids)
    check_logprobs(choice.logprobs, other.logprobs, tolerance)
    assert choice.cumulative_logprob == pytest.approx(
        other.cumulative_logprob, abs=tolerance * len(choice.token_ids)
    )


def check_logprobs(entries: Any, wanted: Any, tolerance: float) -> None:
    for entry, other in zip(entries, wanted, strict=True):
        values = {token: one.logprob for token, one in entry.items()}
        due = {token: one.logprob for token, one in other.items()}
        # The last of the likeliest may be another one of as good as the same probability.
        assert len(values) == len(due)
        assert sorted(values.values()) == pytest.approx(sorted(due.values()), abs=tolerance)
        for token in values.keys() & due.keys():
            assert values[token] == pytest.approx(due[token], abs=tolerance)


def check_stream(llm: LLM, prompt: list[int], params: SamplingParams, want: RequestOutput) -> None:
    """Piece by piece the same text, tokens and log-probabilities."""
    if params.n > 1:
        return
    pieces = [output.outputs[0] for output in llm.stream(prompt, params) if output.outputs]
    other = want.outputs[0]
    assert [token for piece in pieces for token in piece.token_ids] == other.token_ids
    assert "".join(piece.text for piece in pieces) == other.text
    assert pieces[-1].finish_reason == other.finish_reason
    if params.logprobs is not None:
        told = [entry for piece in pieces for entry in piece.logprobs or ()]
        check_logprobs(told, other.logprobs, 1e-3)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 40))]
)
def test_random_engines_and_requests(seed: int):
    check_mix(seed)
