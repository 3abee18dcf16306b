"""The whole engine against Transformers in float32: tokens equal, log-probabilities within 1e-4."""

from __future__ import annotations

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.models.interface import CausalLM
from octavo.sampling import logprobs
from tests import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)


def make(variant: str, **settings) -> LLM:
    values = dict(
        model=str(tiny.checkpoint(variant)), dtype="float32", device="cpu", num_threads=1,
        max_model_len=tiny.CONTEXT, skip_tokenizer_init=True,
        check_invariants=True, max_num_seqs=16, kv_cache_memory_bytes=8 << 20,
    ) | settings  # fmt: skip
    return LLM(**values)


def expected(variant: str) -> list[list[int]]:
    return [tiny.greedy(variant, i) for i in range(len(tiny.PROMPTS))]


def generate(llm: LLM, prompts=tiny.PROMPTS) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.proves("safetensors")
@pytest.mark.parametrize("variant", sorted(tiny.VARIANTS))
def test_variants_equal_transformers(variant):
    with make(variant, max_num_batched_tokens=64) as llm:
        assert generate(llm) == expected(variant)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(tiny.PROMPTS, outputs, strict=True):
        reference = tiny.logits(variant, prompt).log_softmax(-1)
        assert output.prompt_logprobs[0] is None
        got = torch.tensor(
            [e[t].logprob for e, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        )
        want = reference[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunks_blocks_and_overlap_change_nothing(chunk, block_size, overlap):
    with make("qwen3", max_num_batched_tokens=chunk, block_size=block_size, async_scheduling=overlap) as llm:
        assert generate(llm) == expected("qwen3")
        # Again, with the prompts' blocks in the cache.
        outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected("qwen3")
        cached = [(len(p) - 1) // block_size * block_size for p in tiny.PROMPTS]
        assert [o.num_cached_tokens for o in outputs] == cached


@pytest.mark.parametrize("variant", ["gemma3", "phi3-longrope"])
@pytest.mark.parametrize(
    ("chunk", "block_size", "overlap"), [(1, 8, True), (7, 16, False), (64, 32, True), (4096, 8, False)]
)
def test_windows_and_scaled_positions_under_chunks(variant, chunk, block_size, overlap):
    with make(variant, max_num_batched_tokens=chunk, block_size=block_size, async_scheduling=overlap) as llm:
        assert generate(llm) == expected(variant)
        before = llm.stats().prefix_cache_hits
        assert generate(llm) == expected(variant)  # with the prompts' blocks in the cache
        assert llm.stats().prefix_cache_hits > before


@pytest.mark.parametrize(("variant", "memory"), [("gemma3", 240 << 10), ("phi3-longrope", 150 << 10)])
def test_preemption_of_windows_and_scaled_positions(variant, memory):
    with make(variant, kv_cache_memory_bytes=memory, block_size=8, look_ahead_admission=False) as llm:
        prompts = [tiny.PROMPTS[2], tiny.PROMPTS[1], tiny.PROMPTS[0]]
        assert generate(llm, prompts) == expected(variant)[::-1]
        assert llm.stats().num_preemptions > 0
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_changes_nothing(overlap):
    # 3 requests of up to 164 tokens in room for 200.
    per_token = 3 * 2 * 2 * 16 * 4
    settings = dict(block_size=8, async_scheduling=overlap, look_ahead_admission=False)
    with make("llama", kv_cache_memory_bytes=200 * per_token, **settings) as llm:
        assert llm.facts.num_blocks == 25
        prompts = [tiny.PROMPTS[2], tiny.PROMPTS[1], tiny.PROMPTS[0]]
        assert generate(llm, prompts) == expected("llama")[::-1]
        assert llm.stats().num_preemptions > 0
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_attention_backends_agree(backend):
    with make("mistral", attention_backend=backend) as llm:
        assert generate(llm) == expected("mistral")


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_gguf_file_equals_its_folder(variant, tmp_path):
    file = tiny.gguf_file(variant, tmp_path / "tiny.gguf")
    with LLM(
        str(file),
        dtype="float32",
        device="cpu",
        num_threads=1,
        kv_cache_memory_bytes=8 << 20,
        max_model_len=tiny.CONTEXT,
    ) as llm:
        assert generate(llm) == expected(variant)


def test_seeded_sampling_does_not_depend_on_the_batch():
    """Alone, in a batch of seeded and unseeded requests, and with preemption: the same tokens."""
    base = dict(max_tokens=40, ignore_eos=True, detokenize=False)
    seeded = SamplingParams(temperature=0.8, seed=1234, **base)
    with make("llama") as llm:
        alone = llm.generate([tiny.PROMPTS[1]], seeded, use_tqdm=False)[0].outputs[0].token_ids
        others = [
            SamplingParams(temperature=1.0, **base),
            SamplingParams(temperature=0.8, seed=7, **base),
            seeded,
        ]
        mixed = llm.generate([tiny.PROMPTS[0], tiny.PROMPTS[1], tiny.PROMPTS[1]], others, use_tqdm=False)
        assert mixed[2].outputs[0].token_ids == alone
        assert mixed[1].outputs[0].token_ids != alone
        unseeded = SamplingParams(temperature=0.8, **base)
        twice = [
            llm.generate([tiny.PROMPTS[1]], unseeded, use_tqdm=False)[0].outputs[0].token_ids for _ in "12"
        ]
        assert twice[0] != twice[1]
        three = llm.generate([tiny.PROMPTS[1]], seeded.clone(n=3), use_tqdm=False)[0]
        texts = [tuple(choice.token_ids) for choice in three.outputs]
        assert len(set(texts)) == 3
        assert list(texts[0]) == alone
        again = llm.generate([tiny.PROMPTS[1]], seeded.clone(n=3), use_tqdm=False)[0]
        assert [tuple(choice.token_ids) for choice in again.outputs] == texts
    per_token = 3 * 2 * 2 * 16 * 4
    settings = dict(block_size=8, max_num_seqs=4, look_ahead_admission=False)
    with make("llama", kv_cache_memory_bytes=160 * per_token, **settings) as llm:
        prompts = [tiny.PROMPTS[2][:60], tiny.PROMPTS[1], tiny.PROMPTS[1]]
        outputs = llm.generate(prompts, others, use_tqdm=False)
        assert llm.stats().num_preemptions > 0
        assert outputs[2].outputs[0].token_ids == alone


def test_warm_equals_cold_round_after_round():
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(5, tiny.VOCAB_SIZE, (int(n),), generator=generator).tolist()
        for n in torch.randint(30, 180, (20,), generator=generator)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    with make("qwen2", enable_prefix_caching=False) as llm:
        cold = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with make("qwen2") as llm:
        for round_ in range(3):
            before = llm.stats().prefix_cache_hits
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == cold
            cached = sum(o.num_cached_tokens for o in outputs)
            assert llm.stats().prefix_cache_hits - before == cached
            assert (cached > 0) == (round_ > 0)


def test_many_prompt_logprobs_are_computed_in_slices(monkeypatch):
    """Of no more rows than a slice holds; and they are Transformers'."""
    most, top, asked = 24, 20, []
    monkeypatch.setattr(logprobs, "SLICE_ELEMENTS", most * (tiny.VOCAB_SIZE + 4 * top))
    compute = CausalLM.compute_logits

    def counted(self, hidden):
        asked.append(len(hidden))
        return compute(self, hidden)

    monkeypatch.setattr(CausalLM, "compute_logits", counted)
    prompts = [[*range(5 + i, 245), *range(5, 5 + i)] for i in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=top, detokenize=False)
    with make("llama", max_num_batched_tokens=256) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert max(asked) == most and sum(asked) >= 8 * 239
    for prompt, output in zip(prompts, outputs, strict=True):
        reference = tiny.logits("llama", prompt).log_softmax(-1)
        likeliest = reference.sort(-1, descending=True).values
        assert len(output.prompt_logprobs) == 240
        for row, (token, entry) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True)):
            for told, value in entry.items():
                assert abs(value.logprob - float(reference[row, told])) < 1e-4
            ranked = sorted((value.logprob for value in entry.values()), reverse=True)[:top]
            torch.testing.assert_close(torch.tensor(ranked), likeliest[row, :top], atol=1e-4, rtol=0)
            assert token in entry


def test_choices_of_a_prompt_compute_its_log_probabilities_once():
    prompt, count = tiny.PROMPTS[2], 4
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=3, prompt_logprobs=2, ignore_eos=True, detokenize=False
    )
    with make("llama") as llm:
        [alone] = llm.generate([prompt], params, use_tqdm=False)
        before = llm.stats().iteration_tokens.total
        [output] = llm.generate([prompt], params.clone(n=count), use_tqdm=False)
        rows = llm.stats().iteration_tokens.total - before
        seeded = llm.generate([prompt], params.clone(n=count, prompt_logprobs=None), use_tqdm=False)[0]
    assert rows <= len(prompt) + (count - 1) * 16 + count * 2  # the others find its blocks
    assert output.prompt_logprobs == alone.prompt_logprobs and len(output.prompt_logprobs) == len(prompt)
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in seeded.outputs]


def test_score_adds_up():
    with make("llama") as llm:
        prompt, tail = tiny.PROMPTS[1][:30], tiny.PROMPTS[1][30:]
        score = llm.score([prompt], [tail], use_tqdm=False)[0]
        greedy = llm.score([tiny.PROMPTS[1]], [tiny.greedy("llama", 1)[:5]], use_tqdm=False)[0]
    reference = tiny.logits("llama", tiny.PROMPTS[1]).log_softmax(-1)
    want = sum(float(reference[i - 1, tiny.PROMPTS[1][i]]) for i in range(30, 41))
    assert score.logprob == pytest.approx(want, abs=1e-3)
    assert not score.is_greedy
    assert greedy.is_greedy
