"""Faults that users of other engines met, each asserted by what is right instead."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.worker import memory
from tests import tiny
from tests.engine.simulation import expected, make_core, request, run, tokens_of
from tests.engine.test_llm_parity import GREEDY, make
from tests.engine.test_llm_parity import expected as transformers_tokens

BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4  # of the tiny Llama's KV in float32


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_preemption_and_prefix_hits_at_every_chunk_and_block_size(block_size, chunk, overlap):
    settings = dict(
        max_num_batched_tokens=chunk, block_size=block_size, async_scheduling=overlap,
        look_ahead_admission=False,
    )  # fmt: skip
    prompts, want = tiny.PROMPTS[::-1], transformers_tokens("llama")[::-1]
    # Requests of 164, 105 and 70 tokens, and too little room for all, wherever a block ends.
    room = 224 if block_size == 32 else 192
    with make("llama", kv_cache_memory_bytes=room * BYTES_PER_TOKEN, **settings) as llm:
        for _ in range(2):  # the second time, some of the prompts' blocks are still there
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == want
        assert llm.stats().num_preemptions > 0
        # What this request computes at last fills the cache for the same request after it.
        hits = [llm.generate([prompts[0]], GREEDY, use_tqdm=False)[0] for _ in range(2)][1]
        assert hits.num_cached_tokens == 99 // block_size * block_size
        assert hits.outputs[0].token_ids == want[0]
        assert llm.stats().kv_blocks_used == 0


def test_warm_equals_cold_for_20_prompts_of_100_to_600_tokens(tmp_path):
    tiny.build("llama", max_position_embeddings=1024).save_pretrained(tmp_path)
    rng = random.Random(11)
    prompts = [[rng.randrange(5, tiny.VOCAB_SIZE) for _ in range(rng.randint(100, 600))] for _ in range(20)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    settings = dict(
        dtype="float32", device="cpu", num_threads=1, skip_tokenizer_init=True, check_invariants=True,
        kv_cache_memory_bytes=16 << 20, max_num_seqs=32,
    )  # fmt: skip

    def tokens(llm: LLM) -> tuple[list[list[int]], list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]

    with LLM(str(tmp_path), enable_prefix_caching=False, **settings) as llm:
        cold, cached = tokens(llm)
        assert cached == [0] * 20
    with LLM(str(tmp_path), **settings) as llm:
        for number in range(3):
            warm, cached = tokens(llm)
            assert warm == cold
            assert cached == [(len(p) - 1) // 16 * 16 if number else 0 for p in prompts]


@pytest.mark.parametrize("budget", [5, 16, 64])
def test_a_prompt_that_fills_the_context_stalls_none_of_four_streams(budget):
    limit = 400
    core = make_core(num_blocks=300, max_model_len=limit, max_num_batched_tokens=budget)
    streams = [f"stream-{i}" for i in range(4)]
    for i, name in enumerate(streams):
        core.add(request(name, [i, 1, 2], limit - 3))
    for _ in range(8):
        core.step()
    prompt = [i % 1000 for i in range(limit - 1)]
    core.add(request("long", prompt, 1))
    core.step()
    core.add(request("short", [7] * 20, 2))
    gap = dict.fromkeys(streams, 0)
    first, ended, answer = {}, {}, []
    for step in range(3000):
        outputs = core.step()
        said = {o.request_id for o in outputs if o.new_token_ids}
        for name in streams:
            gap[name] = 0 if name in said else gap[name] + 1
            assert gap[name] <= 1 or name in ended, f"{name} waited for more than two steps"
        for output in outputs:
            if output.new_token_ids:
                first.setdefault(output.request_id, step)
            if output.finish_reason:
                ended[output.request_id] = step
            if output.request_id == "long":
                answer += output.new_token_ids
        if {"long", "short"} <= ended.keys():
            break
    assert answer == expected(prompt, 1)
    # "Long before": the short one waits for its own 20 tokens, not for the rest of the long one's.
    assert first["short"] < first["long"] / 2 or budget >= 64
    assert first["short"] <= 2 * 20 / max(1, budget - 5) + 4


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_50_requests_aborted_at_any_stage_leave_nothing_20_times(overlap):
    rng = random.Random(3)
    core = make_core(num_blocks=32, max_model_len=256, async_scheduling=overlap, max_num_seqs=16)
    for number in range(20):
        names = [f"{number}-{i}" for i in range(50)]
        for name in names:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
            core.add(request(name, prompt, rng.randint(1, 40), stream=rng.random() < 0.5))
        rng.shuffle(names)
        while names:
            for _ in range(rng.randint(0, 2)):
                core.step()
            core.abort([names.pop() for _ in range(min(len(names), rng.randint(1, 5)))])
        run(core)
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    prompt = [rng.randrange(1000) for _ in range(200)]
    core.add(request("most of the pool", prompt, 31))  # 230 of 256 tokens
    assert tokens_of(run(core)["most of the pool"]) == expected(prompt, 31)


@pytest.fixture(scope="module")
def several_ends(tmp_path_factory):
    """The tiny Llama with three end tokens: the 7th, 12th and 20th of what it says after `PROMPTS[0]`."""
    folder = tmp_path_factory.mktemp("several-ends") / "model"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    ends = [tiny.greedy("llama", 0)[i] for i in (20, 12, 7)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with LLM(
        str(folder), dtype="float32", device="cpu", num_threads=1, kv_cache_memory_bytes=4 << 20,
        check_invariants=True, max_model_len=tiny.CONTEXT,
    ) as llm:  # fmt: skip
        yield llm, ends


def test_any_end_token_ends_the_text(several_ends):
    llm, ends = several_ends
    tokens = tiny.greedy("llama", 0)
    where = min(tokens.index(end) for end in ends)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    choice = llm.generate([tiny.PROMPTS[0]], params, use_tqdm=False)[0].outputs[0]
    assert choice.token_ids == tokens[: where + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_ignore_eos_makes_exactly_max_tokens(several_ends):
    llm, _ = several_ends
    for count in (1, 13, 60):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        choice = llm.generate([tiny.PROMPTS[0]], params, use_tqdm=False)[0].outputs[0]
        assert choice.token_ids == tiny.greedy("llama", 0)[:count]
        assert choice.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("least", [1, 8, 30])
def test_min_tokens_holds_every_end_back(several_ends, least, temperature):
    llm, ends = several_ends
    stop = tiny.greedy("llama", 0)[2]
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=40, min_tokens=least, stop_token_ids=[stop],
        logit_bias=dict.fromkeys([*ends, stop], 30.0),
    )  # fmt: skip
    choice = llm.generate([tiny.PROMPTS[0]], params, use_tqdm=False)[0].outputs[0]
    assert not {*ends, stop} & set(choice.token_ids[:least])
    # With such a bias the first token that may end the text does.
    assert len(choice.token_ids) == least + 1
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == (stop if choice.token_ids[-1] == stop else None)


GPU = torch.device("cuda:0")


def gpu_memory(monkeypatch, free: int, total: int, ours: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: ours)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_memory_of_other_processes_is_not_counted_as_ours(monkeypatch):
    # Of 100 GB others hold 30 and the weights 10; a step needs 5.
    gpu_memory(monkeypatch, free=60, total=100, ours=10)
    config = make_config(gpu_memory_utilization=0.9)
    assert memory.kv_budget(config, GPU, activation_bytes=5, block_bytes=1).num_bytes == 90 - 40 - 5
    gpu_memory(monkeypatch, free=2, total=100, ours=10)
    with pytest.raises(ConfigError) as caught:
        memory.kv_budget(config, GPU, activation_bytes=5, block_bytes=1)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("90 bytes asked", "2 free", "needs 5", "gpu_memory_utilization", "max_num_batched_tokens"):
        assert part in message
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=50 does not fit: 2 bytes are free"):
        memory.kv_budget(make_config(kv_cache_memory_bytes=50), GPU, activation_bytes=5, block_bytes=1)
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override=5 \(50 bytes\) does not fit: 2 bytes"):
        memory.kv_budget(make_config(num_gpu_blocks_override=5), GPU, activation_bytes=5, block_bytes=10)
    with pytest.raises(ConfigError, match="weights need 3 bytes and 2 are free on cuda:0"):
        memory.check_weights_fit(3, GPU)


def test_a_stated_cache_must_fit_for_all_ranks_of_a_cpu(monkeypatch):
    class Free:
        available = 250

    monkeypatch.setattr(memory, "detect_memory", Free)
    config, cpu = make_config(kv_cache_memory_bytes=100), torch.device("cpu")
    assert memory.kv_budget(config, cpu, 0, 10, ranks=2).num_bytes == 100
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=100 on each of 3 ranks does not fit: 250"):
        memory.kv_budget(config, cpu, 0, 10, ranks=3)


def make_config(**settings):
    from octavo.config import EngineConfig

    return EngineConfig(**settings)
