"""Latent attention's layers: order of rotary rows, kv_b_proj taken apart, the choice of backends."""

from __future__ import annotations

import logging

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels import reference
from octavo.kernels.cpu import ops
from octavo.kv.format import KVFormat
from octavo.layers import latent_attention_cpu
from octavo.layers.latent_attention import LatentAttention, TorchLatentAttention, latent_backend_class
from octavo.layers.latent_attention_cpu import CPULatentAttention
from octavo.layers.latent_attention_linear import (
    LatentDownLinear,
    LatentQueryLinear,
    LatentUpProjection,
    half_rotation_order,
)
from octavo.layers.layer import BuildContext, Layer
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.config import LatentConfig, RopeConfig
from octavo.models.targets import canonical, missing
from octavo.parallel.state import TensorParallelGroup
from octavo.quantization.linear_method import UnquantizedLinearMethod
from tests.kernels.latent_cases import expected_attention, latent_batch
from tests.layers.building import build_context

SIZES = LatentConfig(q_rank=None, kv_rank=20, nope_dim=6, rope_dim=8, value_dim=5)


def build(dtype: torch.dtype = torch.float32, group: TensorParallelGroup | None = None) -> BuildContext:
    return build_context(
        dtype=dtype,
        attention_backend="cpu",
        kv_dtype=str(dtype).removeprefix("torch."),
        group=group or TensorParallelGroup(),
        linear_method=lambda prefix, parts=(): UnquantizedLinearMethod(),
    )


def loaded(layer: Layer, tensors: dict[str, torch.Tensor], context: BuildContext) -> Layer:
    layer.create_weights(context, "a.x")
    targets = layer.load_targets("a.x")
    for name, tensor in tensors.items():
        assert targets[name].shape == tuple(tensor.shape)
        targets[name].load(tensor)
    assert missing(tensors, targets) == []
    layer.process_after_load()
    return layer


def rotate_pairs(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Neighbouring elements as complex numbers, turned: what DeepSeek does."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def test_half_rotation_of_reordered_rows_is_the_rotation_of_neighbours():
    torch.manual_seed(0)
    heads, head_dim, rope, rows = 3, 14, 8, 4
    order = half_rotation_order(heads, head_dim, rope)
    assert order.sort().values.equal(torch.arange(heads * head_dim))
    cos_sin = torch.randn(16, rope)
    x, y = torch.randn(rows, heads, head_dim), torch.randn(rows, heads, head_dim)
    at = torch.tensor([3, 0, 15, 7])
    scores = torch.einsum(
        "rhd,shd->rsh",
        rotate_pairs(x[..., -rope:], cos_sin[at][:, None]),
        rotate_pairs(y[..., -rope:], cos_sin[at][:, None]),
    )
    ours = [z.flatten(1)[:, order].view_as(z)[..., -rope:].clone() for z in (x, y)]
    reference.rotary(*ours, cos_sin, at)
    torch.testing.assert_close(torch.einsum("rhd,shd->rsh", *ours), scores)
    # The other parts of a head stay where they are.
    assert x.flatten(1)[:, order].view_as(x)[..., :-rope].equal(x[..., :-rope])


@pytest.mark.parametrize("rank", [0, 1])
def test_projections_of_a_rank_put_rotary_rows_in_order(rank: int):
    torch.manual_seed(0)
    context = build(group=TensorParallelGroup(rank, 2))
    head_dim, hidden = SIZES.nope_dim + SIZES.rope_dim, 12
    weight, x = torch.randn(4 * head_dim, hidden), torch.randn(3, hidden)
    for interleaved in (True, False):
        layer = LatentQueryLinear(hidden, 4, SIZES, interleaved)
        order = half_rotation_order(4, head_dim, SIZES.rope_dim) if interleaved else slice(None)
        mine = (x @ weight.T)[:, order].chunk(2, dim=-1)[rank]
        torch.testing.assert_close(loaded(layer, {"a.x.weight": weight}, context)(x), mine)


def test_down_projection_joins_compressed_queries_and_kv():
    torch.manual_seed(0)
    sizes = LatentConfig(q_rank=9, kv_rank=20, nope_dim=6, rope_dim=8, value_dim=5)
    tensors = {
        "a.q_a_proj.weight": torch.randn(9, 12),
        "a.q_a_proj.bias": torch.randn(9),
        "a.kv_a_proj_with_mqa.weight": torch.randn(28, 12),
        "a.kv_a_proj_with_mqa.bias": torch.randn(28),
    }
    layer = loaded(
        LatentDownLinear(12, sizes, bias=True, interleaved=True),
        tensors,
        build(group=TensorParallelGroup(1, 2)),
    )
    x = torch.randn(3, 12)
    q, kv = (
        x @ tensors[f"a.{name}.weight"].T + tensors[f"a.{name}.bias"]
        for name in ("q_a_proj", "kv_a_proj_with_mqa")
    )
    torch.testing.assert_close(layer(x), torch.cat([q, kv[:, half_rotation_order(1, 28, 8)]], dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_up_projection_is_taken_apart(rank: int, split: bool, dtype: torch.dtype):
    """By heads, whether the checkpoint holds it whole or, as newer GGUF files do, in two parts."""
    torch.manual_seed(0)
    heads, local = 4, slice(2 * rank, 2 * rank + 2)
    whole = torch.randn(heads, SIZES.nope_dim + SIZES.value_dim, SIZES.kv_rank).to(dtype)
    keys, values = whole.split([SIZES.nope_dim, SIZES.value_dim], dim=1)
    tensors = {"a.x.weight": whole.flatten(0, 1)}
    if split:
        tensors = {
            "a.k_b_proj.weight": keys.transpose(1, 2).contiguous(),
            "a.v_b_proj.weight": values.contiguous(),
        }
    layer = loaded(LatentUpProjection(heads, SIZES), tensors, build(dtype, TensorParallelGroup(rank, 2)))
    assert isinstance(layer, LatentUpProjection)
    assert layer.w_uk.float().equal(keys[local].float()) and layer.w_uv.float().equal(values[local].float())
    assert not list(layer.parameters())  # nothing is kept twice
    q, latent = torch.randn(3, 2, SIZES.nope_dim).to(dtype), torch.randn(3, 2, SIZES.kv_rank).to(dtype)
    out = torch.full((3, 2, SIZES.kv_rank + 3), float("nan")).to(dtype)
    layer.absorb(q, out[..., : SIZES.kv_rank])
    close = dict(rtol=1e-5, atol=1e-5) if dtype is torch.float32 else dict(rtol=2e-2, atol=5e-2)
    want = torch.einsum("rhn,hnk->rhk", q.float(), keys[local].float())
    torch.testing.assert_close(out[..., : SIZES.kv_rank].float(), want, **close)
    assert out[..., SIZES.kv_rank :].isnan().all()
    want = torch.einsum("rhk,hvk->rhv", latent.float(), values[local].float()).flatten(1)
    expanded = layer.expand(latent)
    assert expanded.dtype is dtype
    torch.testing.assert_close(expanded.float(), want, **close)


def test_a_checkpoint_lacks_kv_b_proj_unless_one_spelling_is_complete():
    layer = LatentUpProjection(4, SIZES)
    layer.create_weights(build(), "a.x")
    targets = layer.load_targets("a.x")
    whole, keys, values = "a.x.weight", "a.k_b_proj.weight", "a.v_b_proj.weight"
    assert set(targets) == {whole, keys, values} and set(canonical(targets)) == {keys, values}
    assert missing([whole], targets) == [] == missing([keys, values], targets)
    assert missing([keys], targets) == [values]


def test_backends_by_name():
    assert latent_backend_class("torch") is TorchLatentAttention
    assert latent_backend_class("cpu") is CPULatentAttention
    with pytest.raises(ConfigError, match="'flashinfer' has no latent attention"):
        latent_backend_class("flashinfer")


def test_plain_backend_cannot_be_recorded():
    _, _, meta = latent_batch([(1, 9)], 4, 16, 8, 8)
    plain = TorchLatentAttention(4, KVFormat("float32", 8, 1, 24, latent=True), 16, 0.2)
    for method in (plain.prepare_capture, plain.prepare_replay):
        with pytest.raises(NotImplementedError, match="torch attention cannot be captured"):
            method(meta)
    assert not plain.recordable


@pytest.mark.skipif(not ops.available(), reason=ops.why_not())
def test_cpu_backend_equals_the_plain_one():
    q, cache, meta = latent_batch([(1, 9), (7, 20)], 4, 16, 8, 8)
    backend = CPULatentAttention(4, KVFormat("float32", 8, 1, 24, latent=True), 16, 0.2)
    want = expected_attention(q, cache, meta, 16, 0.2)
    torch.testing.assert_close(backend.attend(q, cache, meta), want)  # not planned before
    assert isinstance(meta.plan, ops.AttentionBatch)
    torch.testing.assert_close(backend.attend(q, cache, meta), want)


@pytest.mark.parametrize(("dtype", "rank"), [("float16", 16), ("float32", 18)])
def test_what_the_kernels_cannot_take_is_served_plainly_and_said_once(dtype, rank, caplog, monkeypatch):
    monkeypatch.setattr(latent_attention_cpu, "_announced", set())
    q, cache, meta = latent_batch([(1, 9), (4, 20)], 4, rank, 8, 8, dtype)
    cache = cache.nan_to_num(0.0)
    fmt = KVFormat(dtype, 8, 1, rank + 8, latent=True)
    with caplog.at_level(logging.WARNING):
        first, _ = (CPULatentAttention(4, fmt, rank, 0.2) for _ in "12")
        first.plan(meta)
        got = first.attend(q, cache, meta)
    want = expected_attention(q, cache, meta, rank, 0.2)
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3)
    said = [x.getMessage() for x in caplog.records]
    assert len(said) == 1 and (dtype if dtype == "float16" else "kv_rank 18") in said[0]


def test_the_format_of_the_cache_is_one_vector_per_token():
    up = LatentUpProjection(4, SIZES)
    layer = LatentAttention(4, SIZES, RotaryEmbedding(RopeConfig(1e4, 8), 64), RMSNorm(20, 1e-6), up, 0.3)
    layer.create_weights(build(group=TensorParallelGroup(0, 2)), "attn")
    assert layer.fmt == KVFormat("float32", 8, 1, 28, latent=True)
    assert layer.fmt.layer_block_shape() == (1, 1, 8, 28)
    assert (layer.backend.num_heads, layer.backend.scale) == (2, 0.3)
    assert not list(layer.children())  # norm, rotary and projection keep their owners' names
