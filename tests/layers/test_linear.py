"""Sharded linear and vocabulary layers: every rank's piece, and the pieces together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError, ModelError
from octavo.layers.activation import gated_activation
from octavo.layers.backends import resolve_backend
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.layer import Layer
from octavo.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from octavo.models.targets import missing
from octavo.parallel.state import TensorParallelGroup, tensor_parallel_group, use_group
from octavo.quantization.linear_method import linear_method, widening_linear
from octavo.quantization.scheme import QuantizationConfig
from tests.layers.building import build_context
from tests.parallel.threads import on_ranks


def built(layer: Layer, group: TensorParallelGroup, weights: dict[str, torch.Tensor], prefix: str) -> Layer:
    build = build_context(group=group)
    with torch.no_grad():
        layer.create_weights(build, prefix)
        targets = layer.load_targets(prefix)
        assert not missing(weights, targets)
        assert all(targets[name].shape == tensor.shape for name, tensor in weights.items())
        for name, tensor in weights.items():
            targets[name].load(tensor)
        layer.process_after_load()
    return layer


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_then_row_parallel(size: int):
    torch.manual_seed(0)
    up, up_bias, down, down_bias = torch.randn(12, 6), torch.randn(12), torch.randn(6, 12), torch.randn(6)
    x = torch.randn(3, 6)

    def rank(group):
        first = built(ColumnParallelLinear(6, 12, bias=True), group, {"a.weight": up, "a.bias": up_bias}, "a")
        second = built(
            RowParallelLinear(12, 6, bias=True), group, {"b.weight": down, "b.bias": down_bias}, "b"
        )
        assert first(x).shape == (3, 12 // size)
        return second(first(x))

    expected = F.linear(F.linear(x, up, up_bias), down, down_bias)
    for result in on_ranks(size, rank):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_widening_linear(dtype: torch.dtype, biased: bool):
    torch.manual_seed(4)
    # 700 columns make slices of 374 rows: two whole ones and a rest.
    x, weight = torch.randn(9, 700).to(dtype), torch.randn(800, 700).to(dtype)
    bias = torch.randn(800).to(dtype) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    actual = widening_linear(x, weight, bias)
    assert actual.dtype == dtype
    # One rounding of the result: half a unit in the last place, and float32's error in the sum.
    unit = torch.finfo(dtype).eps / 2
    assert ((actual.double() - exact).abs() <= unit * exact.abs() * 1.01 + 1e-4).all()


def test_merged_parts_keep_their_order_on_each_rank():
    torch.manual_seed(1)
    gate, up, x = torch.randn(8, 4), torch.randn(8, 4), torch.randn(2, 4)
    weights = {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}

    def rank(group):
        layer = MergedColumnParallelLinear(4, {"gate_proj": 8, "up_proj": 8})
        return built(layer, group, weights, "mlp.gate_up_proj")(x)

    results = on_ranks(2, rank)
    for part, matrix in enumerate((gate, up)):
        together = torch.cat([r[:, 4 * part : 4 * part + 4] for r in results], dim=-1)
        torch.testing.assert_close(together, F.linear(x, matrix))


@pytest.mark.parametrize(
    ("size", "kv_heads", "held"),
    [(1, 2, [[0, 1]]), (2, 2, [[0], [1]]), (4, 2, [[0], [0], [1], [1]]), (4, 1, [[0]] * 4)],
)
def test_kv_heads_go_with_their_queries(size: int, kv_heads: int, held: list[list[int]]):
    """Each head's weights are filled with its number, so that the output names the heads."""
    heads, dim, hidden = 8, 2, 3
    weights = {
        f"{name}_proj.weight": torch.arange(n).float().repeat_interleave(dim)[:, None].expand(-1, hidden)
        / hidden
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    for rank in range(size):
        group = TensorParallelGroup(rank, size)
        layer = built(QKVParallelLinear(hidden, dim, heads, kv_heads), group, weights, "qkv_proj")
        q, k, v = layer.split(torch.ones(1, hidden))
        mine = list(range(rank * heads // size, (rank + 1) * heads // size))
        assert q[0, :, 0].round().int().tolist() == mine
        assert k[0, :, 1].round().int().tolist() == v[0, :, 0].round().int().tolist() == held[rank]
        assert sorted({head * kv_heads // heads for head in mine}) == held[rank]


def test_sizes_that_do_not_split_are_refused():
    group = TensorParallelGroup(0, 3)
    with pytest.raises(ConfigError, match="num_attention_heads=8 .* tensor_parallel_size=3"):
        built(QKVParallelLinear(3, 2, 8, 2), group, {}, "qkv_proj")
    with pytest.raises(ConfigError, match="num_key_value_heads=4 .* a divisor or a multiple of 4"):
        built(QKVParallelLinear(3, 2, 12, 4), TensorParallelGroup(0, 6), {}, "qkv_proj")
    with pytest.raises(ConfigError, match="down's input size=8 .* use a divisor of 8"):
        built(RowParallelLinear(8, 4), group, {}, "down")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_is_split_and_padded(size: int, tied: bool):
    torch.manual_seed(2)
    embedding, head = torch.randn(7, 4), torch.randn(7, 4)
    ids = torch.arange(7)

    def rank(group):
        lookup = built(VocabEmbedding(7, 4), group, {"embed.weight": embedding}, "embed")
        output = LMHead(7, 4, lookup if tied else None)
        built(output, group, {} if tied else {"head.weight": head}, "head")
        vectors = lookup(ids)
        return vectors, output(vectors)

    for vectors, logits in on_ranks(size, rank):
        torch.testing.assert_close(vectors, embedding)
        torch.testing.assert_close(logits, embedding @ (embedding if tied else head).T)


def test_tied_head_that_is_stored_all_the_same():
    embedding = torch.randn(7, 4)
    lookup = built(VocabEmbedding(7, 4), tensor_parallel_group(), {"embed.weight": embedding}, "embed")

    def head(stored: torch.Tensor) -> LMHead:
        return built(LMHead(7, 4, lookup), tensor_parallel_group(), {"head.weight": stored}, "head")

    tied = head(embedding.clone())
    assert tied.packed is not None or tied.weight is lookup.weight  # no third copy is kept
    assert torch.equal(tied(torch.eye(4)), embedding.T)
    other = torch.randn(7, 4)
    assert torch.equal(head(other)(torch.eye(4)), other.T)
    assert torch.equal(lookup.weight, embedding)


def test_group_in_force():
    assert (tensor_parallel_group().rank, tensor_parallel_group().size) == (0, 1)
    with use_group(TensorParallelGroup(1, 2)) as _:
        assert tensor_parallel_group().rank == 1
    assert tensor_parallel_group().size == 1
    with pytest.raises(ValueError, match="rank 2 is not among 2"):
        TensorParallelGroup(2, 2)


def test_choices_that_are_refused():
    with pytest.raises(ConfigError, match="quantization by 'nf3'"):
        linear_method(QuantizationConfig("nf3"), "layer")
    with pytest.raises(ModelError, match="hidden_act='mish'"):
        gated_activation("mish")
    with pytest.raises(ConfigError, match="attention_backend='flash' is not known"):
        resolve_backend("flash", torch.device("cpu"))
    with pytest.raises(ConfigError, match="does not run on cuda"):
        resolve_backend("cpu", torch.device("cuda"))
    assert resolve_backend("auto", torch.device("cpu")) == "cpu"
    assert resolve_backend(None, torch.device("cuda")) == "triton"
