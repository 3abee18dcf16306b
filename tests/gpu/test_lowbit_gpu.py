"""Products in 8 bits on a device: sizes of models, launches that overlap, graphs, equal bits every time."""

# Without a device nothing may be imported that defines kernels (tests/kernels interprets them).
# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo import LLM, SamplingParams
from octavo.kernels import lowbit_ops, ops, reference, reference_lowbit
from octavo.kernels.triton import choice_8bit, lowbit, rows_8bit
from octavo.kernels.triton.linear_choice import Choice
from octavo.kernels.triton.lowbit_8bit import form_of, multiply
from octavo.kernels.triton.row_8bit import row_8bit
from octavo.kernels.triton.row_8bit_warps import WarpsConfig, row_8bit_warps
from octavo.kernels.triton.rows_8bit import FP8_GROUPS, FP8_ROWS, INT8_ROWS, Form, Rows8
from octavo.kernels.triton.skinny_8bit import skinny_8bit
from octavo.kernels.triton.skinny_linear import SkinnyConfig
from octavo.kernels.triton.workspace import workspace
from tests import tiny
from tests.engine.closeness import SCORED, logprobs_of
from tests.kernels import lowbit_cases
from tests.kernels.lowbit_cases import KINDS
from tests.kernels.poison import poison

DEVICE = torch.device("cuda", torch.cuda.current_device())
BF16 = torch.bfloat16
GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)
# In, out: the products of Llama-8B and Qwen3-0.6B.
SHAPES = [
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096),
    (1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024),
]  # fmt: skip
ROWS = (1, 3, 8, 32, 100, 512, 4096)
CONFIGS = [
    SkinnyConfig(64, 128, 4, 4, 1, 32),
    SkinnyConfig(64, 128, 4, 4, 3, 32, True, 32),
    SkinnyConfig(32, 128, 3, 4, 2, 16),
    SkinnyConfig(128, 128, 3, 8, 1, 0, False, 128),
    SkinnyConfig(64, 128, 4, 4, 2, 32, False, 64),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch hold NaN until they are written."""
    poison(monkeypatch, DEVICE)


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_models(kind: str, shape: tuple[int, int]) -> None:
    """What is chosen agrees with the plain twin: by the rounding of bfloat16, and of FP8's sums."""
    case = lowbit_cases.make(kind, max(ROWS), *shape, BF16, "cuda", bias=False)
    product: Any = getattr(lowbit, f"{kind}_linear")
    want = case.want()
    for rows in ROWS:
        # The rows' sizes grow: those of a product are of many.
        picked = torch.randperm(max(ROWS), device=DEVICE)[:rows]
        got = product(case.x[picked], case.weight, case.scale)
        # The library's sums of FP8 keep 14 bits from step to step of 14336.
        assert far(got, want[picked]) < 6e-3, rows
    assert not workspace(DEVICE).counters.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_odd_sizes(kind: str, config: SkinnyConfig) -> None:
    for rows, size_in, size_out, dtype in [
        (1, 1000, 200, BF16),
        (17, 577, 77, torch.float16),
        (33, 64, 1, BF16),
        (130, 2100, 300, torch.float32),
    ]:
        case = lowbit_cases.make(kind, rows, size_in, size_out, dtype, "cuda", pad=8)
        codes = rows_8bit.quantize_rows(case.x, form_of(case.weight, case.scale))
        got = skinny_8bit(codes, case.weight, case.scale, case.bias, dtype, config)
        assert far(got, case.want()) < (1e-3 if dtype is torch.float32 else 4e-3), (rows, size_in)
    assert not workspace(DEVICE).counters.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [None, (4, 8, 2), (2, 4, 3), (4, 4, 2, 4), (8, 8, 1, 2), (4, 8, 4, 1)])
def test_one_row(kind: str, config: tuple[int, ...] | None) -> None:
    split = config is not None and len(config) > 3 and config[3] > 1
    shapes = [(4096, 6144, BF16), (1000, 202, torch.float16)]
    if split or config is None:  # else the row takes more registers than there are
        shapes.append((14336, 1024, BF16))
    for size_in, size_out, dtype in shapes:
        case = lowbit_cases.make(kind, 1, size_in, size_out, dtype, "cuda", given=size_in == 1000)
        rest = (case.weight, case.scale, case.bias, case.given)
        assert far(row_8bit(case.x, *rest, config=config)[0], case.want()) < 4e-3
        if split:
            continue
        got = row_8bit(case.x, *rest, act="silu", config=config)[0]
        assert far(got, reference.silu_and_mul(case.want().to(dtype))) < 6e-3
        norm, residual = torch.randn(size_in, device=DEVICE).to(dtype), torch.randn_like(case.x)
        got, stream = row_8bit(case.x, *rest, norm=(norm, 1e-5), residual=residual, config=config)
        normed, total = ops.add_rms_norm(case.x, residual.clone(), norm, 1e-5)
        assert torch.equal(stream, total)
        assert far(got, case.want(normed)) < 1e-2


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("config", [WarpsConfig(16, 256, 8), WarpsConfig(16, 512, 8)])
def test_one_row_by_warps(kind: str, config: WarpsConfig) -> None:
    for size_in, size_out, dtype in ((4096, 6144, BF16), (4096, 202, BF16), (1000, 202, torch.float16)):
        case = lowbit_cases.make(kind, 1, size_in, size_out, dtype, "cuda", True, size_in == 1000, pad=8)
        rest = (case.weight, case.scale, case.bias, case.given)
        assert far(row_8bit_warps(case.x, *rest, None, None, config)[0], case.want()) < 4e-3
        norm, residual = torch.randn(size_in, device=DEVICE).to(dtype), torch.randn_like(case.x)
        got, stream = row_8bit_warps(case.x, *rest, (norm, 1e-5), residual, config)
        normed, total = ops.add_rms_norm(case.x, residual.clone(), norm, 1e-5)
        assert torch.equal(stream, total)
        assert far(got, case.want(normed)) < 1e-2


GIVEN = Form(torch.int8, False, torch.tensor([0.01]))


@pytest.mark.parametrize("form", [FP8_ROWS, FP8_GROUPS, INT8_ROWS, GIVEN])
@pytest.mark.parametrize("size", [77, 1024, 4096, 14336, 28672])
def test_rows_are_the_twins(form: Form, size: int) -> None:
    """To the bit, and the same from an activation as after it."""
    if form.given is not None:
        form = form._replace(given=form.given.to(DEVICE))
    sizes = torch.tensor([1e-3, 1.0, 300.0, 0.0, 2.0], device=DEVICE)[:, None]
    x = (torch.randn(5, 2 * size, device=DEVICE) * sizes).to(BF16)
    half = x[:, :size]
    same(rows_8bit.quantize_rows(half, form), plain(half, form))
    same(rows_8bit.gated_quantize(x, "silu", form), plain(ops.silu_and_mul(x), form))
    weight = torch.randn(size, device=DEVICE).to(BF16)
    stream = torch.randn_like(half)
    normed, _ = ops.add_rms_norm(half, stream.clone(), weight, 1e-5)
    # A sum of squares in another order may round a number of the norm the other way.
    got = rows_8bit.rms_norm_quantize(half, stream, weight, 1e-5, form)
    assert far(numbers(got), numbers(plain(normed, form))) < 0.01


def numbers(rows: Rows8) -> torch.Tensor:
    wide = rows.codes.float()
    if rows.scale.dim() == 1:
        return wide * rows.scale[:, None]
    return wide * rows.scale.repeat_interleave(128, 1)[:, : wide.shape[1]]


def plain(x: torch.Tensor, form: Form) -> Rows8:
    if form.grouped:
        return Rows8(*reference_lowbit.quantize_groups_fp8(x))
    if form.dtype is torch.int8:
        return Rows8(*reference_lowbit.quantize_rows_int8(x, form.given))
    return Rows8(*reference_lowbit.quantize_rows_fp8(x, form.given))


def same(got: Rows8, want: Rows8) -> None:
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.codes.float(), want.codes.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 40, 300])
def test_overlapping_launches(kind: str, rows: int) -> None:
    """A chain as in a model's layers: as one by one, from a graph, and every time."""
    hidden, inner = 1024, 3072
    ups = [lowbit_cases.make(kind, 1, hidden, 2 * inner, BF16, "cuda", bias=False) for _ in range(6)]
    downs = [lowbit_cases.make(kind, 1, inner, hidden, BF16, "cuda", bias=False) for _ in range(6)]
    factor = torch.ones(hidden, device=DEVICE).to(BF16)
    start = torch.randn(rows, hidden, device=DEVICE).to(BF16)

    def chain(wait: bool) -> torch.Tensor:
        x, stream = start, start.clone()
        for up, down in zip(ups, downs, strict=True):
            act = ops.silu_and_mul if rows == 1 else None
            gates, stream = lowbit_ops.rms_norm_w8a8_linear(
                x, stream, factor, 1e-5, up.weight, up.scale, act=act
            )
            if wait:
                torch.cuda.synchronize()
            if rows == 1:
                product: Any = getattr(lowbit_ops, f"{kind}_linear")
                x = product(gates, down.weight, down.scale)
            else:
                x = lowbit_ops.gated_w8a8_linear(gates, ops.silu_and_mul, down.weight, down.scale)
            if wait:
                torch.cuda.synchronize()
        return x

    want = chain(True)
    assert want.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(False)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)
    assert not workspace(DEVICE).counters.any()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_library_and_our_kernel_agree(kind: str) -> None:
    for rows in (17, 128, 1000):
        case = lowbit_cases.make(kind, rows, 1024, 2048, BF16, "cuda", bias=True)
        codes = rows_8bit.quantize_rows(case.x, form_of(case.weight, case.scale))
        rest = (codes, case.weight, case.scale, case.bias, BF16)
        for choice in (Choice("cublas"), Choice("skinny", SkinnyConfig(64, 128, 4, 4, 1, 0, False, 64))):
            assert far(multiply(*rest, choice), case.want()) < 4e-3, (rows, choice)


def test_choices_are_made_without_the_device() -> None:
    """Nothing that is chosen waits for the device: choices depend on sizes."""
    kinds: tuple[choice_8bit.Kind8, ...] = ("fp8", "fp8_block", "int8")
    for kind in kinds:
        for size_in, size_out in SHAPES:
            for rows in ROWS:
                choice = choice_8bit.choose(rows, size_in, size_out, False, kind, BF16, DEVICE)
                assert rows == 1 or choice.kind not in ("few_rows", "warps")
                if kind == "fp8" and rows >= 512:
                    assert choice.kind == "cublas"


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_block", "int8"])
def test_engine(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine: recorded steps as without; and as near to the model in 16 bits as the plain twins are,
    of which other codes come (a sum rounded otherwise moves some of them, and these move others)."""

    def run(quantization: str | None = quantization, **settings: Any) -> tuple[list[list[int]], torch.Tensor]:
        with LLM(
            str(tiny.checkpoint("llama")), device="cuda", dtype="bfloat16", quantization=quantization,
            max_model_len=tiny.CONTEXT, skip_tokenizer_init=True, max_num_seqs=16,
            kv_cache_memory_bytes=64 << 20, **settings,
        ) as llm:  # fmt: skip
            tokens = []
            for prompts in (tiny.PROMPTS[:1], tiny.PROMPTS):
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                tokens += [list(output.outputs[0].token_ids) for output in outputs]
            scored = llm.generate(tiny.PROMPTS, SCORED, use_tqdm=False)
        pairs = zip(scored, tiny.PROMPTS, strict=True)
        return tokens, torch.cat([logprobs_of(output, prompt) for output, prompt in pairs])

    tokens, scores = run()
    assert (tokens, True) == (run(enforce_eager=True)[0], bool(scores.isfinite().all()))
    monkeypatch.setattr(lowbit_ops, "_kernels", lambda device_type: reference_lowbit)
    plainly = run(enforce_eager=True)[1]
    exact = run(None, enforce_eager=True)[1]
    error, theirs = (float((x - exact).square().mean().sqrt()) for x in (scores, plainly))
    print(quantization, error, theirs, float((scores - plainly).square().mean().sqrt()))
    assert 0 < theirs and error <= 1.25 * theirs
