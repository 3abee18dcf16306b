"""Speculative decoding by CUDA graphs: in float32 no method changes a token, whatever the engine does beside,
and as many drafts stand as of those that are made eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests import tiny
from tests.engine.speculative_methods import METHODS, check_drafted, config, spoil_free_pages

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo.worker.graph_recorder import GraphRecorder  # noqa: E402
from octavo.worker.graphs import DecodeGraphs  # noqa: E402
from tests.kernels.draft_cases import check_append, check_judge, check_place  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)
WORKER = ["draft_model", "pard", "eagle3"]


def make(method: str | None, most: int = 4, **settings: Any) -> LLM:
    values = dict(
        model=str(tiny.checkpoint("llama")), device="cuda", dtype="float32", max_model_len=tiny.CONTEXT,
        skip_tokenizer_init=True, check_invariants=True, max_num_seqs=16, kv_cache_memory_bytes=64 << 20,
        max_num_batched_tokens=256,
    ) | settings  # fmt: skip
    if method is not None:
        fields = {} if "adaptive" not in values else {"adaptive": values.pop("adaptive")}
        values["speculative_config"] = config(method, most, **fields)
    return LLM(**values)


def generate(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(tiny.PROMPTS, params, use_tqdm=False)]


def expected() -> list[list[int]]:
    return [tiny.greedy("llama", i) for i in range(len(tiny.PROMPTS))]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Paddings of steps that were replayed, and keys of drafting that was."""
    found: list[Any] = []
    run, work = DecodeGraphs.run, GraphRecorder.run

    def run_step(self: DecodeGraphs, inputs: Any) -> Any:
        if (inputs.padding, False) in self._graphs:
            found.append(inputs.padding)
        return run(self, inputs)

    def run_work(self: GraphRecorder, key: Any, do: Any) -> None:
        if key in self._works:
            found.append(key)
        work(self, key, do)

    monkeypatch.setattr(DecodeGraphs, "run", run_step)
    monkeypatch.setattr(GraphRecorder, "run", run_work)
    return found


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("drafts", [[1], [5], [0, 4, 1, 2, 4], [24, 3]])
def test_judging(drafts: list[int], given: bool):
    from octavo.kernels.triton import drafts as kernels

    check_judge(kernels, drafts, given, "cuda")


def test_placing_and_appending():
    from octavo.kernels.triton import drafts as kernels

    for counts in ([1, 1, 1], [2, 2], [6], [3, 0, 5, 1]):
        check_place(kernels, counts, 16, 3, "cuda")
    for mapped in (False, True):
        check_append(kernels, 2, mapped, "cuda")


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_plain_decoding(method: str, replays: list[Any]):
    with make(method) as llm:
        for _ in range(3):
            assert generate(llm) == expected()
        check_drafted(llm)
    assert any(key.most > 1 for key in replays if hasattr(key, "most"))
    assert any(isinstance(key, tuple) and isinstance(key[0], str) for key in replays) == (method in WORKER)


def drawn(llm: LLM) -> list[list[int]]:
    """Tokens at a temperature."""
    params = [GREEDY.clone(temperature=0.8, seed=5 + i, max_tokens=40) for i in range(len(tiny.PROMPTS))]
    return generate(llm, params)


def mixed(llm: LLM) -> list[list[int]]:
    """Tokens of requests that ask for different things, some of which recorded drafts do not mind."""
    settings: list[dict[str, Any]] = [
        dict(temperature=0.0), dict(temperature=0.9, seed=3), dict(temperature=0.9, seed=4, top_k=5),
        dict(temperature=0.0, repetition_penalty=1.3), dict(temperature=0.0, logprobs=2),
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, **one) for one in settings]
    prompts = [tiny.PROMPTS[i % 3] for i in range(len(params))]
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[list[int]]]:
    """What is drawn, and what requests of all kinds get, without drafts."""
    with make(None) as llm:
        return drawn(llm), mixed(llm)


@pytest.mark.parametrize("method", WORKER)
def test_as_many_drafts_stand_as_of_those_made_eagerly(method: str, plain: Any):
    found = []
    for eager in (False, True):
        with make(method, enforce_eager=eager) as llm:
            tokens, one = generate(llm), llm.stats()
            also, both = drawn(llm), llm.stats()
        assert tokens == expected() and also == plain[0]
        found.append((one.spec_drafts, one.spec_accepted_per_pos, both.spec_accepted_per_pos))
    assert found[0] == found[1]
    assert sum(found[0][2]) > sum(found[0][1]) > 0


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_whatever_requests_ask(method: str, plain: Any):
    with make(method) as llm:
        assert mixed(llm) == plain[1]


@pytest.mark.parametrize(
    "method, settings",
    [(method, dict(max_num_batched_tokens=7)) for method in WORKER]
    + [
        (
            "eagle3",
            dict(kv_cache_memory_bytes=220 << 10, block_size=8, look_ahead_admission=False, max_num_seqs=3),
        ),
        ("eagle3", dict(adaptive=True)),
        ("draft_model", dict(adaptive=True)),
        ("eagle3", dict(async_scheduling=False)),
    ],
)
def test_whatever_the_engine_does_beside(method: str, settings: dict[str, Any]):
    with make(method, **settings) as llm:
        for _ in range(2):
            assert generate(llm) == expected()
        assert ("kv_cache_memory_bytes" in settings) <= (llm.stats().num_preemptions > 0)


def test_synthetic_acceptance_is_that_of_eager_steps():
    counts = []
    for eager in (False, True):
        with make("eagle3", 3, enforce_eager=eager, speculative_synthetic_acceptance="0.8,0.7,0.6") as llm:
            params = [GREEDY.clone(seed=i) for i in range(3)]
            generate(llm, params)
            counts.append((llm.stats().spec_drafts, llm.stats().spec_accepted_per_pos))
    assert counts[0] == counts[1]
    first, second, third = counts[0][1]
    assert counts[0][0] > first > second > third > 0


@pytest.mark.parametrize(("method", "kv_cache_dtype"), [("draft_model", "int8"), ("pard", "fp8")])
def test_what_lay_in_a_page_before_does_not_matter(method: str, kv_cache_dtype: str):
    """A pool in which pages go from the target to drafts and back, and hold NaN in between."""
    settings: dict[str, Any] = dict(
        kv_cache_memory_bytes=200 << 10,
        block_size=8,
        enable_prefix_caching=False,
        kv_cache_dtype=kv_cache_dtype,
    )
    found = []
    for spoils in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            spoilt = spoil_free_pages(patch) if spoils else [1]
            with make(method, **settings) as llm:
                found.append([generate(llm) for _ in range(2)])
                assert llm.stats().spec_draft_tokens > 0
            assert sum(spoilt) > 0
    assert found[0] == found[1]
