"""Pipeline stages change nothing: whole engines against Transformers, or against one stage.

Stages are threads here, with several steps under way; `test_stage_processes.py` has them as they are.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.engine import core as core_module
from octavo.errors import ConfigError, RequestFailedError
from octavo.kv.capacity import request_blocks
from octavo.models.llama import LlamaDecoderLayer
from octavo.step_messages import StepPlan
from octavo.worker import worker as worker_module
from octavo.worker.model_runner import ModelRunner
from octavo.worker.stage_runner import StageRunner
from tests import tiny
from tests.engine.test_llm_parity import expected, generate, make
from tests.engine.test_speculative_parity import Knowing
from tests.parallel.thread_executor import PretendFailure, thread_ranks  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("thread_ranks")

# One of each kind of layer, groups of layers, head and residual stream; `tests/models/test_stage.py` has all.
FAMILIES = [
    *("llama-tied", "qwen2-window", "gemma2", "gemma3", "granite", "olmo2", "stablelm-parallel", "mixtral"),
    *("qwen3-moe", "deepseek-v2", "deepseek-v3"),
]


def staged(variant: str, **settings: Any) -> LLM:
    return make(variant, **dict(pipeline_parallel_size=2) | settings)


@pytest.mark.parametrize("variant", FAMILIES)
def test_families_equal_transformers(variant):
    with staged(variant, max_num_batched_tokens=7, block_size=8) as llm:
        assert generate(llm) == expected(variant)
        before = llm.stats().prefix_cache_hits
        assert generate(llm) == expected(variant)  # again, with the prompts' blocks in the cache
        assert llm.stats().prefix_cache_hits - before == sum((len(p) - 1) // 8 * 8 for p in tiny.PROMPTS)
        assert llm.stats().pipeline_stage_seconds > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tensor, stages, partition", [(1, 3, None), (1, 2, "1,2"), (2, 2, None)])
def test_more_stages_uneven_ones_and_ranks_in_each(tensor, stages, partition, overlap):
    settings = dict(tensor_parallel_size=tensor, pipeline_parallel_size=stages, pp_layer_partition=partition)
    with make("gemma3", **settings, async_scheduling=overlap, max_num_batched_tokens=40) as llm:
        assert generate(llm) == expected("gemma3")
        assert generate(llm, tiny.PROMPTS * 3) == expected("gemma3") * 3


def everything() -> list[SamplingParams]:
    """Requests that ask for much, each by itself."""
    base = dict(max_tokens=24, detokenize=False, ignore_eos=True)
    stops = tiny.greedy("llama", 0)[9:11]
    return [
        SamplingParams(temperature=0.9, seed=5, **base),
        SamplingParams(temperature=0.0, logprobs=3, **base),
        SamplingParams(temperature=0.7, seed=6, top_p=0.8, top_k=30, min_p=0.02, logprobs=2, **base),
        SamplingParams(temperature=0.0, prompt_logprobs=2, **base),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, **base),
        SamplingParams(temperature=1.0, seed=7, frequency_penalty=0.8, logit_bias={40: 3.0}, **base),
        SamplingParams(temperature=0.0, stop_token_ids=stops, **base),
        SamplingParams(temperature=0.0, stop_token_ids=stops, min_tokens=12, **base),
        SamplingParams(temperature=0.0, **base | dict(max_tokens=1)),
        SamplingParams(temperature=0.8, seed=9, n=3, **base),
    ]


def told(output: Any) -> list[Any]:
    """What a request yielded, with log-probabilities in four places."""

    def rounded(places: Any) -> Any:
        return places and [
            place and {token: (round(entry.logprob, 4), entry.rank) for token, entry in place.items()}
            for place in places
        ]

    choices = [(list(c.token_ids), c.finish_reason, rounded(c.logprobs)) for c in output.outputs]
    return [choices, rounded(output.prompt_logprobs)]


@pytest.mark.parametrize("stages, overlap", [(2, False), (3, True)])
def test_all_that_requests_ask_for(stages, overlap):
    prompts = [tiny.PROMPTS[i % 3] for i in range(10)]
    want = []
    for size in (1, stages):
        with make("llama", pipeline_parallel_size=size, async_scheduling=overlap and size > 1) as llm:
            want.append([told(output) for output in llm.generate(prompts, everything(), use_tqdm=False)])
    assert want[0] == want[1]


def test_preemption_and_little_memory():
    with staged("llama", block_size=8) as llm:
        fmt = llm.facts.groups[0].format
    # The larger stage has two layers.
    memory = dict(kv_cache_memory_bytes=25 * 2 * fmt.layer_block_bytes(), block_size=8)
    with staged("llama", **memory, look_ahead_admission=False) as llm:
        assert llm.facts.num_blocks == 25
        assert generate(llm, tiny.PROMPTS[::-1]) == expected("llama")[::-1]
        assert llm.stats().num_preemptions > 0
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_host_tier(variant, monkeypatch):
    monkeypatch.setattr(worker_module, "prefill_rate", lambda *_: 1e-3)  # copying always pays
    settings = dict(block_size=8, max_num_batched_tokens=16, look_ahead_admission=False)
    with staged(variant, **settings) as llm:
        groups = llm.facts.groups
    # Room for the longest request, and not for all of them.
    blocks = request_blocks(groups, max(map(len, tiny.PROMPTS)) + tiny.NEW_TOKENS, rows=16) + len(groups)
    piece = groups[0].format.layer_block_bytes()
    layers = max(len([i for i in group.layers if i < 2]) for group in groups)  # of the larger stage
    memory = dict(kv_cache_memory_bytes=blocks * layers * piece, swap_space=4 * blocks * piece / 2**30)
    with staged(variant, pp_layer_partition="2,1", **settings, **memory) as llm:
        assert llm.facts.num_blocks == blocks
        for _ in range(2):
            assert generate(llm, tiny.PROMPTS[::-1]) == expected(variant)[::-1]
        stats = llm.stats()
        assert stats.host_blocks_out > 0 and stats.host_blocks_in > 0


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_kv_caches_of_eight_bits(kind):
    tokens = []
    for stages in (1, 2):
        with make("llama", pipeline_parallel_size=stages, kv_cache_dtype=kind) as llm:
            tokens.append(generate(llm))
    assert tokens[0] == tokens[1]


def test_forms():
    forms = [
        StructuredOutputsParams(regex="[a-z]{3,12}"),
        StructuredOutputsParams(choice=["left", "right"]),
        StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
        None,
        None,
    ]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=20, structured_outputs=form)
        for i, form in enumerate(forms)
    ]
    prompts = [{"prompt_token_ids": tiny.PROMPTS[i % 3]} for i in range(len(forms))]
    found = []
    for stages, overlap in ((1, False), (2, False), (3, True)):
        settings = dict(pipeline_parallel_size=stages, async_scheduling=overlap, skip_tokenizer_init=False)
        with make("llama", **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] == found[2]


def test_drafts_of_the_host(monkeypatch):
    proposer = Knowing(0.8)
    proposer.answers = [p + e for p, e in zip(tiny.PROMPTS, expected("llama"), strict=True)]
    monkeypatch.setattr(core_module, "make_host_proposer", lambda config: proposer)
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    for stages in (2, 3):
        with staged("llama", pipeline_parallel_size=stages, speculative_config=config) as llm:
            assert generate(llm) == expected("llama")
            stats = llm.stats()
            assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(level):
    with staged("llama") as llm:
        assert generate(llm) == expected("llama")
        assert llm.sleep(level).freed_bytes > 0
        llm.wake_up()
        assert generate(llm) == expected("llama")


BAD = 77


def fails_on(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    """Let the stages of a kind fail steps in which a request begins with the token `BAD`."""
    work = getattr(kind, name)
    bad: dict[int, set[int]] = {}

    def failing(self: Any, plan: StepPlan) -> Any:
        slots = bad.setdefault(id(self), set())
        for admission in plan.admissions:
            slots.discard(admission.slot)
            if admission.token_ids[0] == BAD:
                slots.add(admission.slot)
        if slots & set(plan.slots.tolist()):
            raise PretendFailure("pretend failure")
        return work(self, plan)

    monkeypatch.setattr(kind, name, failing)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind, name", [(StageRunner, "_run"), (ModelRunner, "_execute")])
def test_a_step_that_fails_on_one_stage_ends_the_request_that_makes_it_fail(kind, name, overlap, monkeypatch):
    fails_on(monkeypatch, kind, name)
    params = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [*tiny.PROMPTS, [BAD, *tiny.PROMPTS[0]]]
    with staged("llama", async_scheduling=overlap) as llm:
        with pytest.raises(RequestFailedError, match="pretend failure"):
            llm.generate(prompts, params, use_tqdm=False)
        assert generate(llm) == expected("llama")


def test_what_stages_cannot_do_is_refused_by_name(tmp_path):
    for settings, words in [
        (dict(pipeline_parallel_size=4), "pipeline_parallel_size=4 is more than the model's 3 layers"),
        (dict(pp_layer_partition="2,2"), "pp_layer_partition='2,2' has 4 layers and the model 3"),
        (dict(model_impl="transformers"), "through Transformers' code cannot be divided"),
        (dict(runner="pooling"), "makes embeddings, which pipeline_parallel_size=2 does not serve"),
        (
            dict(speculative_model=str(tiny.checkpoint("llama")), num_speculative_tokens=2),
            "'draft_model' drafts beside the whole model, which pipeline_parallel_size=2 divides",
        ),
    ]:
        with pytest.raises(ConfigError, match=words):
            staged("llama", **settings)
    with pytest.raises(ConfigError, match="pp_layer_partition='2,1' divides layers among pipeline stages"):
        make("llama", pp_layer_partition="2,1")


def test_stages_compute_at_once(monkeypatch):
    """A layer sleeps 10 ms for a row: stages of two layers and of one are up to 1.5 times as fast."""
    forward = LlamaDecoderLayer.forward

    def slow(self: LlamaDecoderLayer, x: torch.Tensor, *rest: Any) -> Any:
        time.sleep(0.01 * len(x))
        return forward(self, x, *rest)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", slow)
    prompts = [[7 + i] for i in range(8)]  # of one token, so that all steps are alike
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    seconds, tokens = [], []
    for stages in (1, 2):
        with make("llama", pipeline_parallel_size=stages, enforce_eager=True) as llm:
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            stats = llm.stats()
    assert tokens[0] == tokens[1]
    assert seconds[0] > 8 * 8 * 0.03
    assert seconds[0] / seconds[1] > 1.2
    # The second stage waits half of the time, the first never: 0.25 at best.
    assert 0.15 < 1 - stats.pipeline_stage_seconds / stats.pipeline_total_seconds < 0.45
