"""Recordings of the CPU kernels: run again they do what the work did, on what lies there now; what cannot be
run again is named; and the threads that stay at hand lose and double no piece of work."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.cpu import build, moe, norm_act, ops, products, quant
from octavo.kernels.cpu.recording import Recording, record
from octavo.kernels.cpu.step_memory import StepMemory
from tests.kernels.quant_cases import FORMATS, matrix

if not quant.lanes():
    pytest.skip("no kernels for quantized matrices on this CPU", allow_module_level=True)

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8
SIZE = HEADS * DIM


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Step:
    """A layer of every kernel that a decode step has, on buffers that stay where they are."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        self.random = torch.Generator().manual_seed(n)
        self.n, self.dtype = n, dtype
        self.table = quant.PackedMatrix([matrix(FORMATS["q8"], 50, SIZE, self.random)], SIZE)
        rows = (HEADS + 2 * KV_HEADS) * DIM
        self.qkv = quant.PackedMatrix([matrix(FORMATS["q4-minimum"], rows, SIZE, self.random)], SIZE)
        self.mlp = quant.PackedMatrix([matrix(FORMATS["q5"], 4096, SIZE, self.random)], SIZE)
        self.down = self._normal(SIZE, 2048) / 50
        self.norm = self._normal(SIZE)
        self.cos_sin = torch.randn(64, DIM, generator=self.random)
        self.cache = torch.zeros(8, 2, KV_HEADS, BLOCK, DIM, dtype=dtype)
        self.ids = torch.zeros(n, dtype=torch.int32)
        self.positions, self.slots = torch.zeros(2, n, dtype=torch.int64)
        self.starts = torch.arange(n + 1, dtype=torch.int32)
        self.lens = torch.zeros(n, dtype=torch.int32)
        self.blocks = torch.arange(2 * n, dtype=torch.int32).view(n, 2) % 8

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def fill(self) -> None:
        """Other inputs in the same places."""
        self.ids.copy_(torch.randint(50, (self.n,), generator=self.random))
        self.positions.copy_(torch.randint(2 * BLOCK, (self.n,), generator=self.random))
        self.lens.copy_(self.positions + 1)
        block = self.blocks.gather(1, (self.positions // BLOCK)[:, None])[:, 0]
        self.slots.copy_(block * BLOCK + self.positions % BLOCK)
        self.cache.copy_(torch.randn(self.cache.shape, generator=self.random))

    def forward(self) -> torch.Tensor:
        x = self.table.look_up(self.ids, self.dtype) * 1.5
        residual = x
        product = self.qkv.linear(norm_act.rms_norm(x, self.norm, 1e-5), None)
        heads = product.unflatten(-1, (-1, DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        ops.rope_and_write_kv(q, k, v, self.cos_sin, self.positions, self.cache, self.slots)
        batch = ops.attention_batch(self.starts, self.lens, self.blocks)
        shape = ops.attention_shape(
            HEADS, KV_HEADS, DIM, BLOCK, DIM**-0.5, None, self.dtype, ops.type_of_cache(self.cache)
        )
        out = torch.empty_like(q)
        ops.attend(shape, batch, q, self.cache, out)
        x, residual = norm_act.add_rms_norm(out.flatten(1), residual, self.norm, 1e-5)
        x = F.linear(self.mlp.linear(x, None, products.SILU), self.down)
        x, _ = norm_act.add_layer_norm(x, residual, self.norm, None, 1e-5)
        return norm_act.softcap(self.table.linear(x, None), 5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 5])
def test_a_replay_is_the_work_on_other_inputs(n: int, dtype: torch.dtype, threads: int) -> None:
    step = Step(n, dtype)
    step.fill()
    cache = step.cache.clone()
    want, after = step.forward(), step.cache.clone()
    step.cache.copy_(cache)
    result, recording = record(step.forward)
    assert recording.problem is None
    assert torch.equal(result, want) and torch.equal(step.cache, after)
    # Nine kernels; PyTorch's are the conversion of the ids, the scale and F.linear (in one or two pieces).
    assert 9 + 3 <= len(recording) <= 9 + 4
    gc.collect()
    others = [torch.full_like(result, torch.nan) for _ in range(50)]  # in whatever memory was given back
    for _ in range(3):
        step.fill()
        cache = step.cache.clone()
        result.fill_(torch.nan)
        recording.replay()
        got, after = result.clone(), step.cache.clone()
        step.cache.copy_(cache)
        assert torch.equal(got, step.forward()) and torch.equal(after, step.cache)
    assert all(bool(x.isnan().all()) for x in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recordings_of_all_sizes_share_the_memory_of_the_largest(dtype: torch.dtype) -> None:
    memory, alone = StepMemory(), []
    steps = [Step(n, dtype) for n in (3, 1, 8, 5)]
    recorded = []
    for step in steps:
        step.fill()
        recorded.append(record(step.forward, memory))
        own = StepMemory()
        record(step.forward, own)
        alone.append(own.num_bytes)
    assert memory.num_bytes == max(alone) == alone[2]
    for _ in range(2):
        for step, (result, recording) in zip(steps, recorded, strict=True):
            step.fill()
            cache = step.cache.clone()
            recording.replay()
            got, after = result.clone(), step.cache.clone()
            step.cache.copy_(cache)
            assert torch.equal(got, step.forward()) and torch.equal(after, step.cache)


def test_layers_share_memory_and_what_is_held_keeps_its_own() -> None:
    random = torch.Generator().manual_seed(1)
    norm, weight = torch.rand(256, generator=random), torch.randn(256, 256, generator=random) / 16
    x = torch.randn(4, 256, generator=random)

    def work(layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        y, held = x, x
        for i in range(layers):
            y = norm_act.rms_norm(y, norm, 1e-5)
            y = F.linear(norm_act.softcap(y + x, 3.0), weight)
            if i == 1:
                held = y
        return y, held[1:3]  # a view holds it as well

    sizes = []
    for layers in (3, 30):
        want, memory = work(layers), StepMemory()
        results, recording = record(lambda layers=layers: work(layers), memory)  # type: ignore[misc]
        assert recording.problem is None
        for _ in range(2):
            assert all(torch.equal(got, of) for got, of in zip(results, want, strict=True))
            for result in results:
                result.fill_(torch.nan)
            recording.replay()
        sizes.append(memory.num_bytes)
    assert sizes[0] == sizes[1] <= 5 * x.nbytes


def test_recording_does_not_import_pytorch_s_compiler() -> None:
    """130 MB of it, and seconds, in the first step."""
    code = (
        "import sys, torch\nfrom octavo.kernels.cpu.recording import record\n"
        "x = torch.ones(2, 2)\nassert record(lambda: x * 2)[1].problem is None\n"
        "print('torch._dynamo' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (lambda x: x.topk(2).values, "topk"),
        (lambda x: x.add_(1), "add_"),
        (lambda x: torch.mul(x, 2, out=x), "out"),
        (lambda x: float(x[0, 0]), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: torch.randn(3), "randn"),
        (lambda x: x.softmax(-1), "softmax"),
    ],
)
def test_what_cannot_be_run_again_is_named(work: Callable[[torch.Tensor], object], problem: str) -> None:
    x = torch.ones(3, 4)
    result, recording = record(lambda: work(x))
    assert result is not None and problem in str(recording.problem)


def test_a_kernel_of_one_step_s_arguments_is_refused() -> None:
    x, weight, out = torch.ones(1, 8), torch.ones(1, 4, 8), torch.zeros(1, 4)
    rows, segments = np.zeros(1, np.int32), np.array([[0, 0, 1]], np.int32)
    _, recording = record(lambda: moe.grouped_linear(x, weight, rows, rows, segments, out))
    assert "one step's" in str(recording.problem) and bool((out == 8).all())


def test_every_kernel_is_recorded_or_refuses() -> None:
    """One that did neither would be left out of replays, silently."""
    # Of loading, not of steps.
    aside = {"octavo_half_panel", "octavo_quant_lanes", "octavo_quant_pack", "octavo_vector_width"}
    kernels = {}
    for source in build.SOURCE_DIR.glob("*.cpp"):
        kernels |= dict(re.findall(r"^OCTAVO_API int32_t (\w+)\((.*?)^}", source.read_text(), re.M | re.S))
    kernels = {k: v for k, v in kernels.items() if k not in aside and "_recording_" not in k}
    assert "octavo_quant_linear" in kernels and len(kernels) >= 15
    for name, body in kernels.items():
        assert f"return {name}(" in body or "refuse_recording();" in body, name


def test_an_error_ends_the_recording() -> None:
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(work)
    norm = torch.ones(8)
    _, recording = record(lambda: norm_act.rms_norm(torch.empty(1, 8), norm, 1e-5))
    assert len(recording) == 1 and isinstance(recording, Recording)


def test_threads_at_hand_share_many_small_loops() -> None:
    """More threads than cores, and thousands of loops: each must be whole before the next one reads it."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        random = torch.Generator().manual_seed(1)
        first = quant.PackedMatrix([matrix(FORMATS["q4"], 4096, 64, random)], 64)
        second = quant.PackedMatrix([matrix(FORMATS["q4"], 64, 4096, random)], 4096)
        x, norm = torch.randn(1, 64, generator=random), torch.ones(64)

        def work() -> torch.Tensor:
            y = x
            for _ in range(20):
                y = norm_act.rms_norm(second.linear(first.linear(y, None), None), norm, 1e-5)
            return y

        want, (result, recording) = work(), record(work)
        assert recording.problem is None and torch.equal(result, want)
        for _ in range(20):
            result.fill_(torch.nan)
            recording.replay()
            assert torch.equal(result, want)
    finally:
        torch.set_num_threads(before)
