"""Routers against Transformers' own; experts' loading in every spelling and slice; one sum over ranks."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3TopkRouter
from transformers.models.mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from octavo.errors import ConfigError, ModelError
from octavo.layers.layer import BuildContext, Layer, LoadTarget
from octavo.layers.moe import Experts, MoE, local_experts
from octavo.layers.router import Router
from octavo.models.config import MoEConfig
from octavo.parallel.state import TensorParallelGroup
from tests.kernels import moe_cases
from tests.layers.building import build_context
from tests.parallel.threads import on_ranks

HIDDEN = 32


def context(
    group: TensorParallelGroup | None = None,
    dtype: torch.dtype = torch.float32,
    expert_parallel: bool = False,
) -> BuildContext:
    return build_context(dtype=dtype, group=group or TensorParallelGroup(), expert_parallel=expert_parallel)


def build(module: nn.Module, prefix: str, build: BuildContext) -> dict[str, LoadTarget]:
    """Make the weights of `module`, all NaN, and return what fills them."""
    targets: dict[str, LoadTarget] = {}
    for name, layer in module.named_modules(prefix=prefix):
        if isinstance(layer, Layer):
            layer.create_weights(build, name)
            targets |= layer.load_targets(name)
    for parameter in module.parameters():
        parameter.data.fill_(float("nan"))
    return targets


def finish(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.process_after_load()
    return module


V2 = dict(hidden_size=HIDDEN, n_routed_experts=24, num_experts_per_tok=4, routed_scaling_factor=16.0)
V3 = dict(
    hidden_size=HIDDEN, n_routed_experts=32, num_experts_per_tok=5, n_group=8, topk_group=3,
    routed_scaling_factor=2.5, norm_topk_prob=True, moe_intermediate_size=24, n_shared_experts=2,
)  # fmt: skip
V3_MOE = MoEConfig(
    32, 5, 24, (0,), shared_size=48, scoring="sigmoid", scale=2.5, correction_bias=True,
    num_groups=8, top_groups=3, group_score="top2",
)  # fmt: skip
ROUTERS = {
    "mixtral": (
        MixtralTopKRouter(MixtralConfig(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2)),
        MoEConfig(8, 2, 1, (0,)),
    ),
    "qwen3": (
        Qwen3MoeTopKRouter(
            Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
        ),
        MoEConfig(128, 8, 1, (0,)),
    ),
    "qwen3-plain": (
        Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=60, num_experts_per_tok=3)),
        MoEConfig(60, 3, 1, (0,), renormalize=False),
    ),
    "deepseek-v2-lite": (
        DeepseekV2TopkRouter(DeepseekV2Config(**V2, topk_method="greedy")),
        MoEConfig(24, 4, 1, (0,), renormalize=False, scale=16.0),
    ),
    "deepseek-v2": (
        DeepseekV2TopkRouter(
            DeepseekV2Config(**V2, topk_method="group_limited_greedy", n_group=6, topk_group=2)
        ),
        MoEConfig(24, 4, 1, (0,), renormalize=False, scale=16.0, num_groups=6, top_groups=2),
    ),
    "deepseek-v3": (DeepseekV3TopkRouter(DeepseekV3Config(**V3)), V3_MOE),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_choose_as_transformers(name: str, dtype: torch.dtype) -> None:
    theirs, moe = ROUTERS[name]
    g = torch.Generator().manual_seed(3)
    theirs.weight.data.normal_(generator=g)
    if moe.correction_bias:
        theirs.e_score_correction_bias.normal_(std=0.3, generator=g)
    theirs = theirs.to(dtype)
    router = Router(HIDDEN, moe, float32=name.startswith("deepseek"))
    targets = build(router, "mlp.gate", context(dtype=dtype))
    state = {f"mlp.gate.{n}": t for n, t in theirs.state_dict().items()}
    assert targets.keys() == state.keys()
    for key, target in targets.items():
        target.load(state[key])
    x = torch.randn(50, HIDDEN, generator=g).to(dtype)
    with torch.no_grad():
        weights, experts = finish(router).choose(x)
        _, want_weights, want = theirs(x)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    want, order = want.sort(-1)
    experts, ours = experts.long().sort(-1)
    assert torch.equal(experts, want)
    tolerance = 4e-3 if dtype is torch.bfloat16 and name.startswith("qwen") else 1e-5  # theirs are rounded
    torch.testing.assert_close(
        weights.gather(1, ours), want_weights.float().gather(1, order), rtol=tolerance, atol=1e-7
    )


@pytest.mark.parametrize(
    ("size", "expert_parallel"), [(1, False), (1, True), (2, False), (2, True), (3, True), (4, True)]
)
def test_deepseek_with_shared_experts_equals_transformers_on_all_ranks(
    size: int, expert_parallel: bool
) -> None:
    """And the ranks add up once: routed and shared experts in one sum."""
    torch.manual_seed(5)
    theirs = DeepseekV3MoE(DeepseekV3Config(**V3))
    for parameter in theirs.parameters():
        parameter.data.normal_(std=0.3)
    theirs.gate.e_score_correction_bias.normal_(std=0.3)
    state = {f"mlp.{n}": t for n, t in theirs.state_dict().items()}
    x = torch.randn(1, 11, HIDDEN)
    with torch.no_grad():
        want = theirs(x)[0]

    def rank(group: TensorParallelGroup) -> torch.Tensor:
        sums = []
        add = group.all_reduce
        group.all_reduce = lambda y: sums.append(0) or add(y)  # type: ignore[method-assign]
        moe = MoE(HIDDEN, V3_MOE, float32_router=True)
        targets = build(moe, "mlp", context(group, expert_parallel=expert_parallel))
        inner, held = moe.experts.w2.shape[2], len(moe.experts.w2)
        if expert_parallel:  # 32 over 3 ranks: 11, 11 and 10
            assert (inner, held) == (24, 32 // size + (group.rank < 32 % size))
        else:
            assert (inner, held) == (24 // size, 32)
        for name, tensor in state.items():
            assert targets[name].shape == tuple(tensor.shape)
            targets[name].load(tensor)
        with torch.no_grad():
            out = finish(moe)(x[0])
        assert len(sums) == 1
        return out

    for got in [rank(TensorParallelGroup())] if size == 1 else on_ranks(size, rank):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("spelling", ["single", "stacked", "joined"])
def test_every_spelling_fills_this_ranks_slices(spelling: str, whole: bool) -> None:
    moe, hidden, inner = MoEConfig(3, 1, 12, (0,)), 8, 12
    gate, up = torch.randn(3, inner, hidden), torch.randn(3, inner, hidden)
    down = torch.randn(3, hidden, inner)
    stored = {
        "single": {
            f"b.experts.{e}.{n}.weight": m[e]
            for n, m in (("w1", gate), ("w3", up), ("w2", down)) for e in range(3)
        },
        "stacked": {"b.experts.w1.weight": gate, "b.experts.w3.weight": up, "b.experts.w2.weight": down},
        "joined": {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down},
    }  # fmt: skip
    canonical = set(stored["single"])
    for rank in range(2):
        experts = Experts(hidden, moe, names=("w1", "w3", "w2"), block="b")
        targets = build(experts, "mlp.experts", context(TensorParallelGroup(rank, 2), expert_parallel=whole))
        covered = set()
        for name, tensor in stored[spelling].items():
            assert targets[name].shape == tuple(tensor.shape)
            targets[name].load(tensor)
            covered |= set(targets[name].covers or (name,))
        assert covered == canonical == {n for n, t in targets.items() if not t.covers}
        if whole:
            mine = slice(0, 2) if rank == 0 else slice(2, 3)
            assert torch.equal(experts.w13, torch.cat([gate, up], 1)[mine])
            assert torch.equal(experts.w2, down[mine])
            continue
        part = slice(6 * rank, 6 * rank + 6)
        assert torch.equal(experts.w13, torch.cat([gate[:, part], up[:, part]], 1))
        assert torch.equal(experts.w2, down[..., part])


def test_experts_that_nobody_chose_are_not_read() -> None:
    case = moe_cases.make(6, 9, 2, HIDDEN, 20, torch.float32, among=4)
    experts = Experts(HIDDEN, MoEConfig(9, 2, 20, (0,)))
    targets = build(experts, "experts", context())
    targets["experts.gate_up_proj"].load(case.w13)
    targets["experts.down_proj"].load(case.w2)
    assert bool(experts.w13[:5].isnan().all())
    assert moe_cases.error(finish(experts)(case.x, case.weights, case.chosen), case) < 1e-6


def test_whole_experts_are_divided_evenly() -> None:
    for count, size in ((8, 3), (9, 4), (4, 4), (5, 1)):
        ranges = [local_experts(count, TensorParallelGroup(rank, size)) for rank in range(size)]
        assert [i for found in ranges for i in found] == list(range(count))
        assert {len(found) for found in ranges} <= {count // size, -(-count // size)}
    with pytest.raises(ConfigError, match="3 experts are fewer than tensor_parallel_size=4: leave it out"):
        local_experts(3, TensorParallelGroup(0, 4))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act='gelu' is not supported in experts"):
        Experts(HIDDEN, MoEConfig(4, 2, 8, (0,)), "gelu")
    with pytest.raises(ConfigError, match="experts' inner size=7 cannot be split.*--enable-expert-parallel"):
        Experts(HIDDEN, MoEConfig(4, 2, 7, (0,))).create_weights(
            context(TensorParallelGroup(0, 2)), "experts"
        )


def test_thousands_of_tensors_load_without_much_overhead() -> None:
    """128 experts in 48 layers: 18 thousand tensors, of few bytes here. Some 0.6 s on a quiet machine."""
    moe = MoEConfig(128, 8, 4, (0,))
    layers = [Experts(8, moe) for _ in range(48)]
    start = time.process_time()
    targets: dict[str, LoadTarget] = {}
    for i, layer in enumerate(layers):
        targets |= build(layer, f"model.layers.{i}.mlp.experts", context())
    tensors = {name: torch.ones(target.shape) for name, target in targets.items() if not target.covers}
    assert len(tensors) == 48 * 128 * 3
    for name, tensor in tensors.items():
        targets[name].load(tensor)
    assert all(bool((p == 1).all()) for layer in layers for p in layer.parameters())
    assert time.process_time() - start < 6
