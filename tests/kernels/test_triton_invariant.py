"""The kernels of `--batch-invariant` in Triton's interpreter: right, and the same bits in any batch.

What the interpreter can show is that the order of all sums is the algorithm's; that tiles and matrix
instructions keep to it is for the device (tests/gpu/test_batch_invariant.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from octavo.kernels.triton import invariant_attention as kernels
from octavo.kernels.triton import invariant_linear as linear
from octavo.kv.format import KVFormat
from octavo.layers.attention_invariant import InvariantAttention
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.loading import build_model, load_targets, load_weights
from tests.kernels.invariance import check_attention, check_linear, same_bits
from tests.kernels.ragged import attention_float64, ragged_batch
from tests.models.paged import PagedRun

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a matrix instruction promises and NumPy's product does not: an element depends on its row and
    column alone, which are multiplied and added up in order."""
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        total = d.data.copy()
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("size_in, size_out", [(80, 40), (33, 7)])
def test_linear_in_float32(size_in: int, size_out: int) -> None:
    check_linear([1, 17, 70], size_in, size_out, torch.float32, DEVICE)


def test_linear_in_float16() -> None:
    check_linear([1, 66], 144, 40, torch.float16, DEVICE, bias=False)


def test_tiles_follow_rows_columns_and_memory() -> None:
    def tile(rows: int, size_out: int, memory: int = 227 << 10) -> tuple[int, int]:
        found = linear.choose_tile(rows, size_out, torch.bfloat16, 132, memory)
        return found.block_m, found.block_n

    assert tile(1, 1024) == tile(64, 1024) == (64, 16)
    assert tile(1, 28672) == (64, 64)
    assert tile(8192, 4096) == (128, 256)
    assert tile(8192, 4096, 99 << 10)[1] < 256
    assert tile(128, 4096) == (128, 32)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so short that small contexts have several, and of two lengths; tiles of few positions."""
    monkeypatch.setattr(kernels, "MIN_CHUNK", 16)
    monkeypatch.setattr(kernels, "MAX_CHUNKS", 2)
    monkeypatch.setattr(kernels, "AT_ONCE", 1)
    use_tile(monkeypatch, kernels.InvariantTile(16, 16, 1, 4, True))


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: kernels.InvariantTile) -> None:
    monkeypatch.setattr(kernels, "tile_config", lambda *args: tile)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "window", "softcap"),
    [("float32", 2, 1, 24, None, None), ("float16", 1, 1, 16, 21, 3.0)],
)
def test_attention_is_the_same_in_any_batch(
    small_chunks: None,
    dtype: str,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
) -> None:
    fmt = KVFormat(dtype, 8, kv_heads, dim)

    def make() -> InvariantAttention:
        return InvariantAttention(heads, fmt, 0.3, window, softcap)

    check_attention(make, heads, fmt, [38, 7], [13], DEVICE)


def test_attention_of_one_chunk_is_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads: no chunks, so no splits."""
    use_tile(monkeypatch, kernels.InvariantTile(16, 16, 1, 4, False))
    fmt = KVFormat("float32", 8, 1, 20)
    check_attention(lambda: InvariantAttention(2, fmt, 0.2, 30), 2, fmt, [35, 11], [12], DEVICE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap"),
    [(4, 2, 16, None, None), (3, 1, 40, 19, 2.0), (20, 1, 16, None, None)],
)
def test_attention_is_right(
    small_chunks: None, monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dim: int, window, softcap
) -> None:
    """Against float64: decodes, chunks, empty requests; several KV heads, groups of no power of two."""
    if heads // kv_heads > 16:
        use_tile(monkeypatch, kernels.InvariantTile(32, 16, 1, 4, True))
    fmt = KVFormat("float32", 8, kv_heads, dim)
    for shapes in ([(1, 40), (0, 0), (1, 1)], [(1, 20), (7, 33), (0, 0), (3, 3)]):
        q, cache, meta = ragged_batch(shapes, heads, fmt, DEVICE)
        got = InvariantAttention(heads, fmt, 0.3, window, softcap).attend(q, cache, meta)
        want = attention_float64(q, cache, meta, 0.3, window, softcap)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_model_computes_the_same_in_any_batch(small_chunks: None) -> None:
    """Logits of a model with q and k norms and a tied head: of whole prompts together, of chunks, and of one
    alone; and close to those of the plain path."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=40, hidden_size=32, intermediate_size=24, num_layers=1,
        num_heads=2, num_kv_heads=1, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4, dim=16), tie_word_embeddings=True, qk_norm=True,
    )  # fmt: skip
    built = dict(dtype=torch.float32, device=DEVICE, block_size=8)
    model = build_model(config, batch_invariant=True, **built)
    g = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(t.shape, generator=g) for name, t in load_targets(model).items()}
    del weights["lm_head.weight"]
    plain = build_model(config, attention_backend="torch", **built)
    for each in (model, plain):
        load_weights(each, weights.items())
    assert model.lm_head.method.name == model.model.layers[0].mlp.down_proj.method.name == "batch-invariant"
    prompts = [torch.randint(40, (n,), generator=g).tolist() for n in (21, 6)]
    want = PagedRun(model, 2, 24).prompts(prompts, 32)
    chunked = PagedRun(model, 2, 24, seed=1).prompts(prompts, 9)
    alone = PagedRun(model, 1, 24).prompts(prompts[:1], 32)
    assert all(same_bits(got, whole) for got, whole in zip(chunked, want, strict=True))
    assert same_bits(alone[0], want[0])
    for got, close in zip(want, PagedRun(plain, 2, 24).prompts(prompts, 32), strict=True):
        torch.testing.assert_close(got, close, atol=1e-4, rtol=1e-4)


@triton.jit
def _note_lengths(positions_ptr, lengths_ptr, WINDOW: tl.constexpr, MIN: tl.constexpr, MAX: tl.constexpr):
    i = tl.program_id(0)
    length = kernels.chunk_length(tl.load(positions_ptr + i), WINDOW, MIN, MAX)
    tl.store(lengths_ptr + i, length)


def test_chunks_grow_with_the_position() -> None:
    """A row's chunks are a matter of its own position; contexts of any length have at most `MAX_CHUNKS`."""

    def lengths_at(positions: list[int], window: int = 0) -> list[int]:
        at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        lengths, most = torch.zeros_like(at), kernels.MAX_CHUNKS
        _note_lengths[(len(at),)](at, lengths, window, kernels.MIN_CHUNK, most)
        return lengths.tolist()

    positions = list(range(511, 1 << 18, 512))
    lengths = lengths_at(positions)
    assert lengths[0] == 512 and lengths == sorted(lengths)
    assert all(-(-(p + 1) // n) <= kernels.MAX_CHUNKS for p, n in zip(positions, lengths, strict=True))
    assert lengths_at([0, 16383, 16384]) == [512, 512, 1024]
    assert lengths_at([1 << 20], window=4096) == [512]


def test_plans_split_what_would_leave_multiprocessors_idle() -> None:
    tile = kernels.tile_config(128, torch.bfloat16, 4, 227 << 10)

    def plan(requests: int, rows: int, longest: int, context: int) -> kernels.InvariantPlan:
        return kernels.make_plan(tile, 32, 8, 128, None, requests, rows, longest, context, 132)

    assert plan(1, 1, 1, 300).splits == 1
    assert plan(1, 1, 1, 4096).splits == 8
    assert plan(1, 1, 1, 131072).splits == 32
    assert plan(512, 512, 1, 131072).splits == 1  # enough programs, and too many states
    assert plan(1, 8192, 8192, 8192).splits == 1
    assert plan(1, 16, 16, 65536).splits > 1
