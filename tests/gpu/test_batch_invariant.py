"""`--batch-invariant` on a device: kernels over rows, tiles and contexts, and whole engines, to the bit."""

# Without a device nothing may be imported that defines kernels (tests/kernels interprets them).
# ruff: noqa: E402

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs an NVIDIA GPU of compute capability 8.0 or above", allow_module_level=True)

from octavo import LLM, SamplingParams
from octavo.kernels.triton import activation, logprobs, norm, rotary_kv
from octavo.kv.format import KVFormat
from octavo.kv.groups import page_bytes
from octavo.layers.attention_invariant import InvariantAttention
from octavo.outputs import RequestOutput
from tests.kernels.invariance import OneRequest, attend_parts, check_attention, check_linear, same_bits
from tests.kernels.ragged import attention_float64, forget_before_window, ragged_batch

ROWS = [1, 3, 16, 64, 65, 200, 512, 2048]
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


@pytest.mark.parametrize(
    ("size_in", "size_out", "dtype"),
    [
        (4096, 6144, torch.bfloat16),  # Llama-8B's qkv
        (14336, 4096, torch.bfloat16),  # and down
        (1024, 6144, torch.bfloat16),  # Qwen3-0.6B's gate and up
        (576, 1536, torch.bfloat16),  # a last block of inputs that is not full
        (1000, 333, torch.float16),
        (520, 264, torch.float32),
    ],
)
def test_linear(size_in: int, size_out: int, dtype: torch.dtype) -> None:
    """Every tile, and so every number of rows, computes the same."""
    check_linear(ROWS, size_in, size_out, dtype, "cuda")


def test_output_head() -> None:
    check_linear([1, 3, 64, 200], 1024, 151936, torch.bfloat16, "cuda", bias=False)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "block", "window", "softcap"),
    [
        ("bfloat16", 32, 8, 128, 16, None, None),
        ("bfloat16", 16, 8, 128, 32, 700, None),
        ("bfloat16", 9, 3, 64, 16, None, 30.0),
        ("float16", 10, 2, 80, 8, 100, None),
        ("bfloat16", 8, 4, 256, 16, 600, 50.0),
        ("bfloat16", 4, 1, 256, 16, None, None),
        ("float32", 8, 2, 64, 16, None, None),
        ("float32", 4, 1, 192, 8, 300, None),
    ],
)
def test_attention(
    dtype: str,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Right against float64, and then the same in chunks, batches, padding and splits of any kind."""
    fmt = KVFormat(dtype, block, kv_heads, dim)

    def make() -> InvariantAttention:
        return InvariantAttention(heads, fmt, dim**-0.5, window, softcap)

    shapes = [(1, 700), (1, 1), (1, 1129), (0, 0), (150, 150), (33, 900), (2, 260)]
    for some in (shapes, [(1, 1700), (1, 1), (1, 600)]):
        q, cache, meta = ragged_batch(some, heads, fmt, "cuda")
        if softcap is not None:
            q *= 8  # scores that the cap bends
        want = attention_float64(q, cache, meta, dim**-0.5, window, softcap)
        if window is not None:
            assert forget_before_window(cache, meta, window)
        got = make().attend(q, cache, meta)
        bound = TOLERANCE[dtype] if softcap is None else max(1e-5, TOLERANCE[dtype])
        assert (got.double() - want).norm() < bound * want.norm()
    check_attention(make, heads, fmt, [1500, 700, 129], [64, 200, 1000], "cuda")


@pytest.mark.parametrize("window", [None, 5000])
def test_attention_of_long_contexts(window: int | None) -> None:
    """Where chunks become longer, and contexts are split over many programs."""
    fmt = KVFormat("bfloat16", 16, 8, 128)
    backend = InvariantAttention(32, fmt, 128**-0.5, window)
    request = OneRequest(32, fmt, 34000, "cuda")
    whole = attend_parts(backend, [request], [(0, request.length)])[0]
    for first, rows in [
        (16383, 1),
        (16384, 1),
        (16380, 9),
        (32767, 3),
        (32768, 1),
        (33000, 1000),
        (33999, 1),
    ]:
        got = attend_parts(backend, [request], [(first, first + rows)])[0]
        assert same_bits(got, whole[first : first + rows]), (first, rows)


def test_what_lies_between() -> None:
    """Norms, rotation, activations, log-probabilities: a row alone is as among many."""
    x = torch.randn(300, 4096, device="cuda").bfloat16()
    residual = torch.randn_like(x)
    weight = torch.randn(4096, device="cuda").bfloat16()
    logits = torch.randn(300, 151937, device="cuda")

    def rotated(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = rows.clone().view(-1, 32, 128).split([16, 8, 8], dim=1)
        w = weight[:128]
        rotary_kv.rotary_and_write_kv(q, k, v, logits[:64, :128], at, q_weight=w, k_weight=w)
        return torch.cat((q, k), 1)

    places = torch.arange(300, device="cuda") % 64
    for part in (slice(7, 8), slice(100, 164)):
        for kernel, inputs in (
            (lambda r: norm.rms_norm(r, weight, 1e-6), (x,)),
            (lambda r, s: torch.cat(norm.add_rms_norm(r, s.clone(), weight, 1e-6)), (x, residual)),
            (lambda r: norm.layer_norm(r, weight, weight, 1e-5), (x,)),
            (activation.silu_and_mul, (x,)),
            (activation.gelu_tanh_and_mul, (x,)),
            (rotated, (x, places)),
            (logprobs.logsumexp, (logits,)),
        ):
            whole = kernel(*inputs)  # type: ignore[operator]
            some = kernel(*[t[part] for t in inputs])  # type: ignore[operator]
            if len(whole) > 300:  # two results, one after the other
                whole = torch.cat((whole[:300][part], whole[300:][part]))
            else:
                whole = whole[part]
            assert same_bits(some, whole), kernel


# ---- engines ------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "llama": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=False,
    ),
    "qwen3": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, tie_word_embeddings=True,
    ),
    "gemma3": dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, tie_word_embeddings=True, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=256,
        rope_local_base_freq=10000.0, hidden_activation="gelu_pytorch_tanh",
    ),
}  # fmt: skip
COMMON: dict[str, Any] = dict(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, vocab_size=32000, rms_norm_eps=1e-6,
    max_position_embeddings=4096, rope_theta=1e6, torch_dtype="bfloat16", hidden_act="silu",
    initializer_range=0.06,
)  # fmt: skip
LENGTHS = (5, 700, 33, 1500, 16, 250, 64, 900)
NEW_TOKENS = 40


def _prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(11)
    return [torch.randint(32000, (n,), generator=g).tolist() for n in LENGTHS]


PROMPTS = _prompts()
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=4)
PLAIN = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
SEEDED = SamplingParams(
    temperature=0.9, top_k=50, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
)


@pytest.fixture(scope="module", params=sorted(SHAPES))
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[request.param]))

    def make_llm(**settings: Any) -> LLM:
        values = dict(
            load_format="dummy", skip_tokenizer_init=True, device="cuda", max_model_len=2048, max_num_seqs=32,
            kv_cache_memory_bytes=512 << 20, batch_invariant=True, check_invariants=True,
        ) | settings  # fmt: skip
        return LLM(str(folder), **values)

    return make_llm


def told(output: RequestOutput) -> tuple[list[int], list[dict[int, tuple[float, int | None]]] | None]:
    """Everything of an answer that numbers decide."""
    choice = output.outputs[0]
    entries = choice.logprobs and [
        {t: (e.logprob, e.rank) for t, e in row.items()} for row in choice.logprobs
    ]
    return choice.token_ids, entries


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    return [told(o) for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(make: Callable[..., LLM]) -> list[Any]:
    """Each prompt by itself, nothing cached, greedy."""
    with make(enable_prefix_caching=False) as llm:
        found = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens, _ in found}) > 4
    return found


@pytest.mark.parametrize(
    "settings",
    [
        dict(enable_prefix_caching=False),
        dict(enable_prefix_caching=False, enforce_eager=True),
        dict(enable_prefix_caching=False, max_num_batched_tokens=64),
        dict(enable_prefix_caching=False, max_num_batched_tokens=1000, async_scheduling=False),
        dict(enable_prefix_caching=False, max_num_seqs=3, block_size=32),
    ],
    ids=str,
)
def test_batches_chunks_and_graphs(
    make: Callable[..., LLM], alone: list[Any], settings: dict[str, Any]
) -> None:
    with make(**settings) as llm:
        assert answers(llm, PROMPTS) == alone
        assert answers(llm, PROMPTS[::-1]) == alone[::-1]
        # Graphs leave tokens alone; without log-probabilities nothing else is computed.
        tokens = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PLAIN, use_tqdm=False)]
        assert tokens == [a[0] for a in alone]


def test_prefix_hits(make: Callable[..., LLM], alone: list[Any]) -> None:
    """Of whole prompts, of beginnings that end anywhere, and of what another request decoded."""
    with make() as llm:
        for _ in range(3):
            assert answers(llm, PROMPTS) == alone
        assert llm.stats().prefix_cache_hits > 0
        longest = PROMPTS[3]
        extended = [longest[:n] + PROMPTS[1][:9] for n in (16, 777, 1040)]
        cached = answers(llm, extended)
        continued = longest + alone[3][0]
        after = answers(llm, [continued])[0]
    with make(enable_prefix_caching=False, max_num_batched_tokens=300) as llm:
        assert [answers(llm, [prompt])[0] for prompt in extended] == cached
        assert answers(llm, [continued])[0] == after


def test_preemption(make: Callable[..., LLM], alone: list[Any]) -> None:
    """Room for all prompts, but not for all that they lead to: some are thrown out and computed again."""
    with make() as llm:
        groups = llm.facts.groups
    blocks = len(groups) * sum(-(-n // 16) + 1 for n in LENGTHS)
    settings = dict(kv_cache_memory_bytes=blocks * page_bytes(groups), max_model_len=1600)
    with make(enable_prefix_caching=False, look_ahead_admission=False, **settings) as llm:
        assert answers(llm, PROMPTS) == alone
        # Windows make room as they go on.
        assert llm.stats().num_preemptions > 0 or any(g.sliding_window for g in groups)


def test_prompts_are_scored_the_same(make: Callable[..., LLM]) -> None:
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, detokenize=False)

    def scores(output: RequestOutput) -> list[Any]:
        assert output.prompt_logprobs is not None
        return [row and {t: e.logprob for t, e in row.items()} for row in output.prompt_logprobs]

    with make() as llm:
        together = [scores(o) for o in llm.generate(PROMPTS, scored, use_tqdm=False)]
    with make(max_num_batched_tokens=128) as llm:
        for prompt, want in zip(PROMPTS, together, strict=True):
            assert scores(llm.generate([prompt], scored, use_tqdm=False)[0]) == want


def test_seeded_samples(make: Callable[..., LLM]) -> None:
    with make() as llm:
        together = answers(llm, PROMPTS, SEEDED)
        assert [answers(llm, [prompt], SEEDED)[0] for prompt in PROMPTS] == together
    with make(enforce_eager=True, max_num_batched_tokens=100) as llm:
        assert answers(llm, PROMPTS[::-1], SEEDED) == together[::-1]
