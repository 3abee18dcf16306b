"""Garbage from a quantized KV cache, a fault of other engines: what the default model says, scored by itself
with a float32 cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.outputs import CompletionOutput
from tests.engine.closeness import SCORED, logprobs_of
from tests.real_models import GEMMA3_270M, fetch

pytestmark = pytest.mark.slow

KINDS = ["fp8", "fp8_e5m2", "int8"]
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
SYSTEM = (
    "You are the librarian of a small town. You answer in one or two short sentences, in plain English, and "
    "you never invent a book. The library is open from nine to five, on Saturdays until noon."
)
QUESTIONS = [
    "When is the library open on Saturdays?",
    "And on other days?",
    "Thank you. Which animal is known as man's best friend?",
]
SUBJECTS = [
    "the sea", "bread", "winter", "a bridge", "horses", "the moon", "copper", "music",
    "rivers", "chess", "tea", "the desert", "glass", "trains", "honey", "mountains",
]  # fmt: skip
ANSWER = SamplingParams(temperature=0.0, max_tokens=24)


@dataclass(frozen=True)
class Budget:
    """What a kind of cache may cost, nats a token.

    Attributes:
        rms, mean: of the change of log-probabilities: root mean square, and how much lower on average.
        answers: how much less likely its answers may be than those of a float32 cache.
    """

    rms: float
    mean: float
    answers: float


BUDGETS = {
    "fp8": Budget(0.35, 0.03, 0.15),
    "fp8_e5m2": Budget(0.7, 0.08, 0.25),
    "int8": Budget(0.12, 0.01, 0.1),
}


@contextmanager
def engine(path: Path, kind: str, **settings) -> Iterator[LLM]:
    values = dict(
        dtype="float32", quantization="none", device="cpu", kv_cache_dtype=kind, max_model_len=2048,
        kv_cache_memory_bytes=200 << 20, max_num_seqs=16, check_invariants=True,
    ) | settings  # fmt: skip
    with LLM(str(path), **values) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(default_model: Path) -> Iterator[LLM]:
    """What scores: a float32 cache."""
    with engine(default_model, "auto") as llm:
        yield llm


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def coded(default_model: Path, kind: str) -> Iterator[LLM]:
    """A cache of 8 bits."""
    with engine(default_model, kind) as llm:
        yield llm


def nats(scorer: LLM, prompt: list[int], answer: list[int]) -> float:
    """Mean negative log-likelihood of an answer's tokens."""
    output = scorer.generate([prompt + answer], SCORED, use_tqdm=False)[0]
    return -float(logprobs_of(output, prompt + answer)[-len(answer) :].mean())


def check_same_but_for_ties(first: CompletionOutput, again: list[int]) -> None:
    """The same tokens, up to one beside which another was as likely: the last rows of a prompt are computed
    in chunks of other sizes then, whose sums are rounded otherwise, and some codes fall to the next."""
    pairs = zip(first.token_ids, again, strict=True)
    parting = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if parting is not None:
        assert first.logprobs is not None
        best, second = sorted((x.logprob for x in first.logprobs[parting].values()), reverse=True)[:2]
        assert best - second < 0.01


def test_log_probabilities_of_a_thousand_tokens(plain, coded, kind):
    prompt = plain.get_tokenizer().encode(TEXT)[200:1224]
    assert len(prompt) == 1024
    want, got = (
        logprobs_of(llm.generate([prompt], SCORED, use_tqdm=False)[0], prompt) for llm in (plain, coded)
    )
    difference, budget = got - want, BUDGETS[kind]
    rms, mean = float(difference.square().mean().sqrt()), float(difference.mean())
    print(f"{kind}: rms {rms:.4f}, mean {mean:+.5f}")
    assert 1e-4 < rms < budget.rms  # 0 would be another cache than was asked for
    assert mean > -budget.mean


def test_three_turns_with_a_system_prompt_and_the_prefix_cache(plain, coded, kind):
    """Each turn finds the blocks of those before it, and says what is as likely as with a float32 cache."""
    worse = []
    said: list[list[int]] = []
    for llm in (coded, plain):
        talk = [{"role": "system", "content": SYSTEM}]
        for number, question in enumerate(QUESTIONS):
            talk.append({"role": "user", "content": question})
            output = llm.chat(talk, ANSWER.clone(logprobs=2), use_tqdm=False)[0]
            prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
            if llm is coded:
                # All whole blocks of the turn before, and of its answer, but for what templates put between.
                assert number == 0 or output.num_cached_tokens >= (len(said[-1]) // 16 - 1) * 16 > 0
                again = llm.generate([prompt], ANSWER, use_tqdm=False)[0]
                assert again.num_cached_tokens >= len(prompt) // 16 * 16 - 16
                check_same_but_for_ties(output.outputs[0], again.outputs[0].token_ids)
                said.append(prompt)
            worse.append((1 if llm is coded else -1) * nats(plain, prompt, answer))
            talk.append({"role": "assistant", "content": output.outputs[0].text})
    print(f"{kind}: {[round(x, 3) for x in worse]}")
    assert sum(worse) / len(QUESTIONS) < BUDGETS[kind].answers


def test_sixteen_at_once(plain, coded, kind):
    talks = [[{"role": "user", "content": f"Tell me in one sentence about {what}."}] for what in SUBJECTS]
    costs = []
    for llm in (coded, plain):
        outputs = llm.chat(talks, ANSWER, use_tqdm=False)
        costs.append(torch.tensor([nats(plain, o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs]))
    mean, plain_mean = (float(cost.mean()) for cost in costs)
    print(f"{kind}: {mean:.3f} against {plain_mean:.3f}, most {float(costs[0].max()):.3f}")
    assert mean - plain_mean < BUDGETS[kind].answers
    assert float(costs[0].max()) < 2.5  # none of them garbage


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The smallest model at hand that finds the needle with a float32 cache; SmolLM2-135M does not."""
    return fetch(GEMMA3_270M)


def needle() -> tuple[str, str]:
    """About 4000 tokens of sentences that say little, one of which holds a key; and the key, asked for at the
    end."""
    rng = random.Random(5)
    things = "The harbour|The mill|A street|The library|The ferry|A horse|The tower|A boat".split("|")
    verbs = "stood near|was older than|lay beyond|was built before|could be seen from|belonged to".split("|")
    lines = [f"{rng.choice(things)} {rng.choice(verbs)} {rng.choice(things).lower()}." for _ in range(520)]
    lines.insert(150, "The pass key is 71436. Remember it: 71436 is the pass key.")
    return " ".join(lines) + "\n\nWhat is the pass key? The pass key is", "71436"


@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_a_needle_in_4000_tokens(gemma, kind):
    text, key = needle()
    settings = dict(quantization=None, max_model_len=4608, kv_cache_memory_bytes=300 << 20)
    with engine(gemma, kind, **settings) as llm:
        output = llm.generate([text], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0]
    assert 3900 < len(output.prompt_token_ids) < 4500
    assert key in output.outputs[0].text
