"""A mixture of experts in place of the feed-forward (arXiv 1701.06538, 2401.04088).

Tensor parallel: every rank holds a slice of every expert's inner dimension, as of a dense feed-forward,
and the ranks' results, those of shared experts included, are added once. Expert parallel: a rank holds some
experts whole instead; what it computes of a row is what its own experts say, and the sum is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from octavo.errors import ConfigError, ModelError
from octavo.layers.activation import gated_activation
from octavo.layers.layer import BuildContext, Layer, LoadTarget, divide
from octavo.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from octavo.layers.router import Router, in_block
from octavo.layers.sublayer import Sublayer
from octavo.models.config import MoEConfig
from octavo.parallel.state import TensorParallelGroup
from octavo.quantization.experts_method import ExpertShard, ExpertsMethod, Matrix
from octavo.quantization.shard import Region
from octavo.quantization.stored_tensor import FLOATS

Names = tuple[str, str, str]
NAMES: Names = ("gate_proj", "up_proj", "down_proj")
_MATRICES: tuple[Matrix, Matrix, Matrix] = ("gate", "up", "down")


def local_experts(num_experts: int, group: TensorParallelGroup) -> range:
    """The experts that a rank holds whole: consecutive ones, of the remainder one each on the first ranks.

    Raises:
        ConfigError: there are fewer than ranks.
    """
    if num_experts < group.size:
        raise ConfigError(
            f"enable_expert_parallel: {num_experts} experts are fewer than tensor_parallel_size={group.size}:"
            " leave it out, so that ranks share each expert, or use fewer ranks"
        )
    share, rest = divmod(num_experts, group.size)
    first = group.rank * share + min(group.rank, rest)
    return range(first, first + share + (group.rank < rest))


class Experts(Layer):
    """The routed experts' SwiGLU feed-forwards, all in one place.

    Checkpoints hold them one by one (`experts.3.gate_proj.weight [inner, hidden]`), stacked
    (`experts.gate_proj.weight [experts, inner, hidden]`, as GGUF does), or stacked with gate and up
    joined (`experts.gate_up_proj [experts, 2 * inner, hidden]` and `experts.down_proj`, Transformers 5's).

    Args:
        hidden_size: of a row.
        moe: number and inner size of the experts.
        activation: Transformers' name of it; SiLU is the one that experts of supported families have.
        names: what checkpoints call the matrices of gate, up and down.
        block: what checkpoints call the block that this lies in, where they call it otherwise than the
            model does; the joined form is always under the model's name.
    """

    method: ExpertsMethod
    group: TensorParallelGroup
    local: range
    numbers: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        activation: str = "silu",
        names: Names = NAMES,
        block: str = "",
    ):
        super().__init__()
        if activation not in ("silu", "swish"):
            raise ModelError(f"hidden_act={activation!r} is not supported in experts: use a model with silu")
        self.hidden_size = hidden_size
        self.moe = moe
        self.names = names
        self.block = block

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        self.group = build.group
        self.method = build.experts_method(prefix, self.first_names(prefix))
        total, count = self.moe.expert_size, self.moe.num_experts
        whole = build.expert_parallel and self.group.size > 1
        self.local = local_experts(count, self.group) if whole else range(count)
        instead = ", or --enable-expert-parallel"
        size = total if whole else divide(total, self.group, f"{prefix}' inner size", instead)
        self.shard = ExpertShard(0 if whole else self.group.rank * size, size, total, self.local.start)
        self.method.create_weights(self, len(self.local), self.hidden_size, size, build.dtype, build.device)
        # What each expert's number is here: `len(local)`, which is none's, for those of other ranks.
        here = [i - self.local.start if i in self.local else len(self.local) for i in range(count)]
        numbers = torch.tensor(here, dtype=torch.int32, device=build.device) if whole else None
        self.register_buffer("numbers", numbers, persistent=False)

    def first_names(self, prefix: str) -> dict[Matrix, str]:
        """What a checkpoint calls the first expert's matrices."""
        stored = in_block(prefix, self.block) if self.block else prefix
        return {matrix: f"{stored}.0.{name}" for matrix, name in zip(_MATRICES, self.names, strict=True)}

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        count, inner, hidden = self.moe.num_experts, self.moe.expert_size, self.hidden_size
        stored = in_block(prefix, self.block) if self.block else prefix
        every = slice(0, len(self.local))
        targets: dict[str, LoadTarget] = {}
        singles: dict[Matrix, tuple[str, ...]] = {}
        for matrix, name in zip(_MATRICES, self.names, strict=True):
            sizes = (hidden, inner) if matrix == "down" else (inner, hidden)
            for tensor, what in self.method.stored(matrix, *sizes).items():
                load = partial(self.method.load_shard, self, tensor, matrix, shard=self.shard)
                region = self.method.region(matrix, tensor, *sizes, self.shard)
                covered = tuple(f"{stored}.{expert}.{name}.{tensor}" for expert in range(count))
                common = LoadTarget(
                    what.full_shape,
                    load,  # by each target with its experts
                    what.optional,
                    other_shapes=what.other_shapes,
                    dtypes=what.dtypes,
                    dummy=what.dummy,
                    any_size=what.any_size,
                    regions=None if region is None else (region,),
                )
                for expert, single in enumerate(covered):
                    if expert in self.local:
                        targets[single] = replace(common, load=partial(load, expert - self.local.start))
                    else:
                        targets[single] = replace(common, load=_not_ours, regions=())
                if what.any_size:
                    continue
                targets[f"{stored}.{name}.{tensor}"] = replace(
                    common,
                    shape=(count, *what.full_shape),
                    other_shapes=tuple((count, *shape) for shape in what.other_shapes),
                    load=partial(self._load_stack, load, every),
                    covers=covered,
                    regions=None if region is None else (self._in_stack(region),),
                )
                if tensor == "weight" and what.dtypes == FLOATS:
                    singles[matrix] = covered
        if len(singles) == len(_MATRICES):
            targets[f"{prefix}.down_proj"] = targets[f"{stored}.{self.names[2]}.weight"]
            joined, (first, size) = (2 * inner, hidden), (self.shard.first, self.shard.size)
            both = (Region(joined, (start + first, 0), (size, hidden)) for start in (0, inner))
            targets[f"{prefix}.gate_up_proj"] = LoadTarget(
                (count, *joined),
                self._load_gate_up,
                covers=singles["gate"] + singles["up"],
                regions=tuple(self._in_stack(region) for region in both),
            )
        return targets

    def _in_stack(self, region: Region) -> Region:
        """What is taken of all experts' tensors, where one's has the region."""
        return region.of_stack(self.moe.num_experts, self.local.start, len(self.local))

    def _load_stack(self, load: Callable[..., None], every: slice, tensor: torch.Tensor) -> None:
        load(every, tensor[self.local.start : self.local.stop])

    def _load_gate_up(self, tensor: torch.Tensor) -> None:
        every = slice(0, len(self.local))
        gate, up = tensor[self.local.start : self.local.stop].chunk(2, dim=1)
        self.method.load_shard(self, "weight", "gate", every, gate, self.shard)
        self.method.load_shard(self, "weight", "up", every, up, self.shard)

    def process_after_load(self) -> None:
        self.method.process_after_load(self)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """This rank's part of every row's weighted sum of experts, to be added over the ranks.

        `x [rows, hidden]`, weights float32 and experts int32 `[rows, top_k]`, to `[rows, hidden]`.
        """
        if self.numbers is not None:
            experts = self.numbers.index_select(0, experts.flatten()).view_as(experts)
        return self.method.apply(self, x, weights, experts)


def _not_ours(tensor: torch.Tensor) -> None:
    """An expert of another rank."""


class SharedExperts(nn.Module):
    """The feed-forward that every row visits; its result is to be added over the ranks."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": inner_size, "up_proj": inner_size}
        )
        self.down_proj = RowParallelLinear(inner_size, hidden_size, reduce_results=False)
        self.act = gated_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj.gated(self.act, x))


class MoE(Sublayer):
    """Router, routed experts and, where the config has them, shared experts.

    Args:
        hidden_size: of a row.
        moe: all about experts and their choice.
        activation: Transformers' name of the experts' activation.
        names: what checkpoints call each expert's matrices of gate, up and down.
        float32_router: see `Router`.
        shared_name: what checkpoints call the shared experts.
        shared_gate: whether the shared experts' result is weighted by the sigmoid of a learned score
            (Qwen2-MoE), whose matrix is `{shared_name}_gate`.
        block: what checkpoints call this block, see `Router` and `Experts`.
    """

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        activation: str = "silu",
        names: Names = NAMES,
        float32_router: bool = False,
        shared_name: str = "shared_experts",
        shared_gate: bool = False,
        block: str = "",
    ):
        super().__init__()
        self.gate = Router(hidden_size, moe, float32_router, block)
        self.experts = Experts(hidden_size, moe, activation, names, block)
        self._reduces = True
        self._shared_name, self._shared_gate_name = shared_name, f"{shared_name}_gate"
        if moe.shared_size:
            self.add_module(shared_name, SharedExperts(hidden_size, moe.shared_size, activation))
            if shared_gate:
                self.add_module(self._shared_gate_name, ReplicatedLinear(hidden_size, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden_size]` to the same."""
        weights, experts = self.gate.choose(x)
        out = self.experts(x, weights, experts)
        if (shared := self._modules.get(self._shared_name)) is not None:
            extra = shared(x)
            if (gate := self._modules.get(self._shared_gate_name)) is not None:
                extra = extra * torch.sigmoid(gate(x))
            out = out + extra
        return self.experts.group.all_reduce(out) if self._reduces else out

    def leave_sums(self) -> None:
        self._reduces = False
