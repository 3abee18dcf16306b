"""The router of a mixture of experts: which experts a row visits, and with what weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.kernels import moe_ops
from octavo.layers.layer import BuildContext, LoadTarget, copy_into, empty_parameter, sibling
from octavo.layers.linear import ReplicatedLinear
from octavo.models.config import MoEConfig


def in_block(prefix: str, block: str) -> str:
    """The module `prefix` in a block of another name: ("a.mlp.gate", "moe") is "a.moe.gate"."""
    parent, _, name = prefix.rpartition(".")
    return f"{sibling(parent, block)}.{name}"


def route(
    logits: torch.Tensor, moe: MoEConfig, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's experts, as Transformers does for the families that `MoEConfig` describes.

    Args:
        logits: `[rows, num_experts]`, any float dtype; scores are float32.
        moe: scoring, number of experts, groups, scale.
        correction_bias: float32 `[num_experts]`, or None.

    Returns:
        weights float32 `[rows, top_k]`, experts int32 `[rows, top_k]`, the best first.
    """
    return moe_ops.route(
        logits,
        moe.top_k,
        moe.scoring == "sigmoid",
        moe.renormalize,
        moe.scale,
        correction_bias,
        moe.num_groups,
        moe.top_groups,
        moe.group_score == "top2",
    )


class Router(ReplicatedLinear):
    """The matrix that scores experts, and the choice by its logits.

    Args:
        hidden_size: of a row.
        moe: how scores become a choice; with `correction_bias` the checkpoint holds one, named
            `e_score_correction_bias`.
        float32: compute the logits in float32 whatever the model's dtype, as DeepSeek does; Mixtral and
            Qwen round them to it.
        block: what checkpoints call the block that this lies in, where they call it otherwise than the
            model does.
    """

    def __init__(self, hidden_size: int, moe: MoEConfig, float32: bool = False, block: str = ""):
        super().__init__(hidden_size, moe.num_experts)
        self.moe = moe
        self.float32 = float32
        self.block = block
        self.e_score_correction_bias: torch.Tensor | None = None

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        wide = replace(build, dtype=torch.float32)
        super().create_weights(wide if self.float32 else build, prefix)
        if self.moe.correction_bias:
            self.e_score_correction_bias = empty_parameter(self.moe.num_experts, build=wide)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        stored = in_block(prefix, self.block) if self.block else prefix
        targets = super().load_targets(stored)
        if (bias := self.e_score_correction_bias) is not None:
            name = f"{stored}.e_score_correction_bias"
            targets[name] = LoadTarget((self.moe.num_experts,), copy_into(bias))
        if stored != prefix:  # Transformers 5 can also save models under its own names
            for name, target in list(targets.items()):
                alias = LoadTarget(target.shape, target.load, covers=(name,))
                targets[prefix + name.removeprefix(stored)] = alias
        return targets

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `[rows, hidden_size]`: weights float32 and experts int32, both `[rows, top_k]`."""
        logits = self(x.float() if self.float32 else x)
        return route(logits, self.moe, self.e_score_correction_bias)
